"""Settings of `prepare`."""

from dataclasses import dataclass, field

from bitdial.config import Config, check_bit_choices, check_choice, check_types
from bitdial.errors import ConfigError
from bitdial.functional import ACTIVATION_KINDS, TIE_RULES, check_phase, scheme_of

STARTS: tuple[str, ...] = ("mse", "3std", "lsq")
SCALE_GRADIENTS: tuple[str, ...] = ("exact", "printed")


@dataclass(frozen=True, kw_only=True)
class Rule(Config):
    """How to treat the layers that match; of several matching rules, the last to speak of a setting wins.

    `pattern` is a shell-style pattern over module names (`layer1.*`), `type` a class name (`Linear`); at least one
    is given, and a layer must match both where both are. `quantize=True` also overrules `keep_first_last`.
    A rule that matches no layer is an error.
    """

    pattern: str | None = None
    type: str | None = None
    quantize: bool | None = None
    activations: str | None = None
    per_channel: bool | None = None

    def __post_init__(self) -> None:
        check_types("Rule", self, {"pattern": str, "type": str, "quantize": bool, "per_channel": bool})
        if self.pattern is None and self.type is None:
            raise ConfigError("a Rule needs a pattern, a type, or both")
        if self.activations is not None:
            check_choice("Rule.activations", self.activations, ("auto", "float", *ACTIVATION_KINDS))
        if self.quantize is None and self.activations is None and self.per_channel is None:
            raise ConfigError(
                f"the rule for {self.pattern or self.type!r} changes nothing; set quantize, activations or per_channel"
            )

    def __str__(self) -> str:
        parts = [f"{k}={v!r}" for k, v in self.to_dict().items() if v is not None]
        return f"Rule({', '.join(parts)})"


@dataclass(frozen=True, kw_only=True)
class QuantConfig(Config):
    """What `prepare` does to a model.

    bit_choices      widths the model learns, descending; the first is what the file stores
    scheme, ties     the weight scheme (see `bitdial.functional`) and the tie rule of its second rounding
    per_channel      a weight scale for each output channel (else one per tensor)
    activations      'auto' (unsigned where calibration sees no negative value, else signed), a kind, or 'float'
    start            starting scales: 'mse' (least squared error over the bit-widths), '3std' (weights mean +- 3 std,
                     activations the 99.9th percentile) or 'lsq' (2 mean|x| / sqrt(Qp))
    scale_gradient   of a weight scale that all widths share: 'exact', or 'printed' (as the paper has it, without the
                     factor 2^shift)
    keep_first_last  keep the first and the last executed layer in float
    switch_norms     give each batch norm one set of parameters and statistics per bit-width
    rules            exceptions by name or type
    """

    bit_choices: tuple[int, ...] = (8, 6, 4, 2)
    scheme: str = "double_rounding"
    ties: str = "even"
    per_channel: bool = True
    activations: str = "auto"
    start: str = "mse"
    scale_gradient: str = "exact"
    keep_first_last: bool = True
    switch_norms: bool = True
    rules: tuple[Rule, ...] = field(default=())

    def __post_init__(self) -> None:
        object.__setattr__(self, "bit_choices", check_bit_choices(self.bit_choices))
        for name in ("per_channel", "keep_first_last", "switch_norms"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r} must be True or False")
        if not isinstance(self.rules, tuple | list):
            raise ConfigError(f"rules={self.rules!r} must be a tuple of Rule")
        scheme = scheme_of(self.scheme)
        check_phase(self.scheme, self.bit_choices[0])
        check_choice("ties", self.ties, TIE_RULES)
        check_choice("activations", self.activations, ("auto", "float", *ACTIVATION_KINDS))
        check_choice("start", self.start, STARTS)
        check_choice("scale_gradient", self.scale_gradient, SCALE_GRADIENTS)
        if self.scale_gradient == "printed" and not scheme.shares_scale:
            raise ConfigError(
                f"scale_gradient='printed' is about a weight scale that all widths share; {self.scheme!r} has none. "
                "Choose double_rounding, nested or truncate, or leave scale_gradient out"
            )
        rules = tuple(r if isinstance(r, Rule) else Rule.from_dict(r) for r in self.rules)
        object.__setattr__(self, "rules", rules)
