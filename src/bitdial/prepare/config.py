"""Settings of `prepare`."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from bitdial.config import Config, check_bit_choices, check_choice, check_types
from bitdial.errors import ConfigError
from bitdial.functional import ACTIVATION_KINDS, GROUP_SCALES, TIE_RULES, check_phase, scheme_of

STARTS: tuple[str, ...] = ("mse", "balanced", "3std", "lsq", "max")
ATTENTION_PRODUCTS: tuple[str, ...] = ("float", "quantized")
SCALE_GRADIENTS: tuple[str, ...] = ("exact", "printed")


@dataclass(frozen=True, kw_only=True)
class Rule(Config):
    """How to treat the layers that match; of several matching rules, the last to speak of a setting wins.

    `pattern` is a shell-style pattern over module names (`layer1.*`), `type` a class name (`Linear`; also that of a
    module which is taken apart, such as `LSTM`, for all its layers); at least one is given, and a layer must match both
    where both are. `quantize=True` also overrules `keep_first_last`, and an Embedding is quantised only where it says
    so. `bits`, one of bit_choices, is a width of its own for each layer that matches: it is quantised, as
    `quantize=True` says, and stays at that width unless a plan names it. `group_size` is that of QuantConfig, or 0 for
    a scale per channel; `per_channel` likewise takes the place of groups. A rule that matches no layer is an error.
    """

    pattern: str | None = None
    type: str | None = None
    quantize: bool | None = None
    activations: str | None = None
    per_channel: bool | None = None
    group_size: int | None = None
    bits: int | None = None

    def __post_init__(self) -> None:
        check_types("Rule", self, {"pattern": str, "type": str, "quantize": bool, "per_channel": bool})
        check_group_size("Rule.group_size", self.group_size, least=0)
        if self.per_channel is False and self.group_size:
            raise ConfigError(f"Rule.group_size={self.group_size} and per_channel=False ask for different scales")
        if self.pattern is None and self.type is None:
            raise ConfigError("a Rule needs a pattern, a type, or both")
        if self.activations is not None:
            check_choice("Rule.activations", self.activations, ("auto", "float", *ACTIVATION_KINDS))
        if self.bits is not None and (type(self.bits) is not int or not 2 <= self.bits <= 8):
            raise ConfigError(f"Rule.bits={self.bits!r} is not a width; give one of bit_choices, such as 8")
        if self.bits is not None and self.quantize is False:
            raise ConfigError(
                f"Rule.bits={self.bits} and quantize=False contradict each other: a layer is quantised at a width, or "
                "stays in float; drop one"
            )
        if {self.quantize, self.activations, self.per_channel, self.group_size, self.bits} == {None}:
            raise ConfigError(
                f"the rule for {self.pattern or self.type!r} changes nothing; set quantize, activations, per_channel, "
                "group_size or bits"
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
    group_size       a weight scale for each group of that many inputs of an output channel, such as 32; None: no
                     groups. A layer of no more inputs has a scale per channel
    group_scales     'integer': a group's scale is a whole number from 1 to 15 times that of its channel, so that
                     integer kernels can add up whole channels; 'half': also, a channel's has 7 significant bits, so
                     that all are exact in 16 bits (GGUF); 'float': any number, for float activations only
    activations      'auto' (unsigned where calibration sees no negative value, else signed), a kind, or 'float'.
                     The kind 'dynamic' is for Linear layers: each token has a scale of its own, made at run time
    attention        the products q k^T and p v of nn.MultiheadAttention: 'float', or 'quantized' (queries, keys and
                     values signed, probabilities unsigned, at the activation bits of the attention's out_proj)
    start            starting scales: 'mse' (least squared error over the bit-widths), 'balanced' (least product of the
                     squared errors, so that no width pays for another), '3std' (weights mean +- 3 std,
                     activations the 99.9th percentile), 'lsq' (2 mean|x| / sqrt(Qp)) or 'max' (the full range: the
                     largest magnitude has the outermost code of the highest width, and nothing is clipped there).
                     Clip ratios of dynamic activations are those of least squared error for 'mse' and 'balanced',
                     else 1 at 5 and more bits, 0.9 below
    importance       of each width to start='balanced', such as {8: 2}; a width that is not named has 1
    scale_gradient   of a weight scale that all widths share: 'exact', or 'printed' (as the paper has it, without the
                     factor 2^shift)
    keep_first_last  True: keep the layers in float that the model's inputs reach first, and those that make its
                     outputs; a width such as 8: quantise them, and let them stay at it; False: as all others
    switch_norms     give each batch norm one set of parameters and statistics per bit-width
    rules            exceptions by name or type
    """

    bit_choices: tuple[int, ...] = (8, 6, 4, 2)
    scheme: str = "double_rounding"
    ties: str = "even"
    per_channel: bool = True
    group_size: int | None = None
    group_scales: str = "integer"
    activations: str = "auto"
    attention: str = "float"
    start: str = "mse"
    importance: dict[int, float] = field(default_factory=dict, hash=False)
    scale_gradient: str = "exact"
    keep_first_last: bool | int = True
    switch_norms: bool = True
    rules: tuple[Rule, ...] = field(default=())

    def importance_of(self, bits: int) -> float:
        """What the error at `bits` weighs in start='balanced'."""
        return self.importance.get(bits, 1.0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "bit_choices", check_bit_choices(self.bit_choices))
        object.__setattr__(self, "importance", check_importance(self.importance, self.bit_choices, self.start))
        for name in ("per_channel", "switch_norms"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r} must be True or False")
        kept = self.keep_first_last
        if not isinstance(kept, bool) and (type(kept) is not int or kept not in self.bit_choices):
            raise ConfigError(
                f"keep_first_last={kept!r} must be True (in float), False (as all others), or one of the widths "
                f"{self.bit_choices} to stay at"
            )
        if not isinstance(self.rules, tuple | list):
            raise ConfigError(f"rules={self.rules!r} must be a tuple of Rule")
        scheme = scheme_of(self.scheme)
        check_phase(self.scheme, self.bit_choices[0])
        check_choice("ties", self.ties, TIE_RULES)
        check_choice("activations", self.activations, ("auto", "float", *ACTIVATION_KINDS))
        check_choice("attention", self.attention, ATTENTION_PRODUCTS)
        if self.attention == "quantized" and self.activations == "float":
            raise ConfigError(
                "attention='quantized' quantises activations, and activations='float' says not to; drop one"
            )
        check_choice("start", self.start, STARTS)
        check_choice("scale_gradient", self.scale_gradient, SCALE_GRADIENTS)
        if self.scale_gradient == "printed" and not scheme.shares_scale:
            raise ConfigError(
                f"scale_gradient='printed' is about a weight scale that all widths share; {self.scheme!r} has none. "
                "Choose double_rounding, nested or truncate, or leave scale_gradient out"
            )
        check_choice("group_scales", self.group_scales, GROUP_SCALES)
        check_group_size("group_size", self.group_size, least=1)
        if self.group_size is not None and not self.per_channel:
            raise ConfigError(f"group_size={self.group_size} and per_channel=False ask for different scales; drop one")
        rules = tuple(r if isinstance(r, Rule) else Rule.from_dict(r) for r in self.rules)
        object.__setattr__(self, "rules", rules)
        for rule in rules:
            if rule.bits is not None and rule.bits not in self.bit_choices:
                raise ConfigError(f"{rule}: bits={rule.bits} is not one of the widths {self.bit_choices}; add it there")
        if not scheme.narrows and (self.group_size or any(rule.group_size for rule in rules)):
            raise ConfigError(
                f"group_size is for schemes that narrow stored integers; {self.scheme!r} rounds each width anew. "
                "Choose double_rounding, nested, centred, truncate or adabits, or leave group_size out"
            )


def check_group_size(name: str, value: object, *, least: int) -> None:
    """Raise ConfigError unless `value` is None or a whole number of at least `least`."""
    if value is not None and (type(value) is not int or value < least):
        raise ConfigError(f"{name}={value!r} must be a whole number of inputs, such as 32")


def check_importance(given: object, bit_choices: tuple[int, ...], start: str) -> dict[int, float]:
    """`given` with whole numbers for keys (JSON makes them text); ConfigError unless it weighs the widths."""
    if not isinstance(given, Mapping):
        raise ConfigError(f"importance={given!r} must be a dict such as {{8: 2.0}}")
    found = {int(bits) if str(bits).isdigit() else bits: value for bits, value in given.items()}
    for bits, value in found.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if bits not in bit_choices or not number or not 0 < value < float("inf"):
            raise ConfigError(
                f"importance={dict(given)!r} must give positive numbers to some of the widths {bit_choices}, as "
                "{8: 2.0} does"
            )
    if found and start != "balanced":
        raise ConfigError(f"importance is for start='balanced'; start is {start!r}")
    return {bits: float(value) for bits, value in found.items()}
