"""The report of `prepare`: how much of a model is quantised, what is not and why, and what it will take.

A file has it as plain data to show. Nothing that runs goes by it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

from bitdial.errors import ConfigError

REPORT = "_bitdial_report"  # the attribute by which a prepared or loaded model knows its report
MOST_ENTRIES, MOST_LETTERS = 100_000, 4_000  # of a list and of a text in a report from a file
MOST_ROWS = 20  # of the printed table
_OPTIONAL = ("fixed_bits", "dynamic_layers")  # in plain data, only where there is something to say


@dataclass(frozen=True)
class FloatLayer:
    """A module with weights that is not quantised. `reason` goes on from its name: "is of type RNN, which ..."."""

    name: str
    type: str
    weights: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class ModelReport:
    """What `prepare` made of a model. `str(report)` is a table, `to_dict()` plain data.

    weights, quantised_weights              elements of all parameters of two or more dimensions; those quantised
    multiply_adds, quantised_multiply_adds  in a pass over the first calibration batch, attention and all
    quantised_layers                        their names
    fixed_bits                              those of them with a width of their own, {name: bits}
    dynamic_layers                          those of them whose activations have a scale for each token
    float_layers                            every other module with weights, and why it stays in float
    switched_norms, kept_norms              the norms with a set per width; why others have none, {name: reason}
    first_layers, last_layers               the ends of the model: which its inputs reach, which make its outputs
    ends_by_order                           "first", "last": which of these could not be followed, so that the order of
                                            execution decided
    float_bytes                             of the float model, in float32
    file_bytes                              of the file's tensors, for all widths; a header of some KB comes on top
    width_bytes                             of the tensors of each width by itself, {bits: bytes}
    warnings                                what `prepare` warned of
    """

    weights: int
    quantised_weights: int
    multiply_adds: int
    quantised_multiply_adds: int
    quantised_layers: tuple[str, ...]
    float_layers: tuple[FloatLayer, ...]
    switched_norms: tuple[str, ...]
    kept_norms: Mapping[str, str]
    first_layers: tuple[str, ...]
    last_layers: tuple[str, ...]
    ends_by_order: tuple[str, ...]
    float_bytes: int
    file_bytes: int
    width_bytes: Mapping[int, int]
    warnings: tuple[str, ...]
    fixed_bits: Mapping[str, int] = field(default_factory=dict)
    dynamic_layers: tuple[str, ...] = ()

    @property
    def quantised_share(self) -> float:
        """The share of the weights that is quantised."""
        return self.quantised_weights / max(self.weights, 1)

    @property
    def quantised_multiply_add_share(self) -> float:
        """The share of the multiply-adds that quantised layers do."""
        return self.quantised_multiply_adds / max(self.multiply_adds, 1)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; `from_dict` gives an equal report back."""
        plain = {key: list(v) if isinstance(v, tuple) else v for key, v in vars(self).items()}
        for key in _OPTIONAL:
            del plain[key]
        return {
            **plain,
            **({"fixed_bits": dict(self.fixed_bits)} if self.fixed_bits else {}),
            **({"dynamic_layers": list(self.dynamic_layers)} if self.dynamic_layers else {}),
            "float_layers": [asdict(layer) for layer in self.float_layers],
            "kept_norms": dict(self.kept_norms),
            "width_bytes": {str(bits): size for bits, size in self.width_bytes.items()},
        }

    @classmethod
    def from_dict(cls, values: Any) -> Self:
        """A report from `to_dict`'s output; ConfigError for anything else."""
        absent = {key for key in _OPTIONAL if isinstance(values, dict) and key not in values}
        _check_fields("the report", values, {each.name for each in fields(cls)} - absent)
        texts = ("quantised_layers", "switched_norms", "first_layers", "last_layers", "ends_by_order", "warnings")
        made: dict[str, Any] = {key: _texts(key, values[key]) for key in texts}
        counts = (
            "weights",
            "quantised_weights",
            "multiply_adds",
            "quantised_multiply_adds",
            "float_bytes",
            "file_bytes",
        )
        made |= {key: _count(key, values[key]) for key in counts}
        made["float_layers"] = tuple(_float_layer(entry) for entry in _entries("float_layers", values, list))
        kept = _entries("kept_norms", values, dict)
        made["kept_norms"] = {_text("kept_norms", name): _text(name, reason) for name, reason in kept.items()}
        sizes = _entries("width_bytes", values, dict)
        made["width_bytes"] = {_width(bits): _count("width_bytes", size) for bits, size in sizes.items()}
        if "dynamic_layers" not in absent:
            made["dynamic_layers"] = _texts("dynamic_layers", values["dynamic_layers"])
        if "fixed_bits" not in absent:
            fixed = _entries("fixed_bits", values, dict)
            made["fixed_bits"] = {_text("fixed_bits", name): _fixed_width(bits) for name, bits in fixed.items()}
        return cls(**made)

    def summary(self) -> str:
        """One line."""
        fixed = f"; {_fixed(self.fixed_bits)}" if self.fixed_bits else ""
        ends = f"first layers {_listed(self.first_layers)}, last layers {_listed(self.last_layers)}"
        return (
            f"{self.quantised_share:.1%} of the weights and {self.quantised_multiply_add_share:.1%} of the "
            f"multiply-adds are quantised{fixed}; {ends}; {len(self.switched_norms)} norms have a set per width; about "
            f"{self.file_bytes:,} bytes, {self.float_bytes:,} in float"
        )

    def __str__(self) -> str:
        by = "by order of execution" if self.ends_by_order else "by the flow of tensors"
        sizes = ", ".join(f"{size:,} at {bits} bits" for bits, size in self.width_bytes.items())
        lines = [
            f"weights        {_part(self.quantised_weights, self.weights)} quantised, "
            f"in {len(self.quantised_layers)} layers",
            *(
                [f"fixed widths   {_fixed(self.fixed_bits)}: {_listed(tuple(self.fixed_bits))}"]
                if self.fixed_bits
                else []
            ),
            *(
                [f"activations    a scale for each token in {len(self.dynamic_layers)} layers"]
                if self.dynamic_layers
                else []
            ),
            f"multiply-adds  {_part(self.quantised_multiply_adds, self.multiply_adds)} by quantised layers, on the "
            "calibration batch",
            f"first layers   {_listed(self.first_layers)}; last layers {_listed(self.last_layers)} ({by})",
            f"norms          {len(self.switched_norms)} with a set per width, {len(self.kept_norms)} without",
            f"bytes          {self.float_bytes:,} in float, {self.file_bytes:,} in a file for all widths",
            f"one width      {sizes}",
        ]
        rows = [
            (
                layer.name or "(the model)",
                f"{layer.weights:,}",
                f"{layer.weights / max(self.weights, 1):.1%}",
                layer.reason,
            )
            for layer in sorted(self.float_layers, key=lambda layer: -layer.weights)
        ]
        lines += _table(("in float", "weights", "share", "why"), rows)
        lines += _table(("norm without sets", "why"), list(self.kept_norms.items()))
        lines += [f"warning: {text}" for text in self.warnings]
        return "\n".join(lines)


def _part(some: int, whole: int) -> str:
    return f"{some:,} of {whole:,} ({some / max(whole, 1):.1%})"


def _fixed(widths: Mapping[str, int]) -> str:
    """How many layers have which width of their own: '2 layers at 8 bits'."""
    counts = {bits: list(widths.values()).count(bits) for bits in sorted(set(widths.values()), reverse=True)}
    return " and ".join(f"{n} layer{'s' if n > 1 else ''} at {bits} bits" for bits, n in counts.items())


def _listed(names: tuple[str, ...]) -> str:
    shown = ", ".join(names[:5]) or "none"
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"


def _table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    """`rows` under `heads`, numbers to the right; nothing without rows."""
    if not rows:
        return []
    shown = [heads, *rows[:MOST_ROWS]]
    widths = [max(len(row[column]) for row in shown) for column in range(len(heads) - 1)]
    lines = []
    for row in shown:
        cells = [c.ljust(w) if at == 0 else c.rjust(w) for at, (c, w) in enumerate(zip(row[:-1], widths, strict=True))]
        lines.append("  ".join([*cells, row[-1]]))
    more = len(rows) - MOST_ROWS
    return ["", *lines, *([f"and {more} more"] if more > 0 else [])]


# --- reports from files ---------------------------------------------------------------------------


def _refuse(key: str, value: object) -> Any:
    raise ConfigError(f"the report's {key} holds {str(value)[:100]!r}, which is not of the right type or size")


def _check_fields(label: str, values: Any, names: set[str]) -> None:
    if not isinstance(values, dict):
        raise ConfigError(f"{label} is not a JSON object")
    if odd := sorted(map(str, values.keys() ^ names)):
        raise ConfigError(f"{label}: {odd[0]!r} is {'missing' if odd[0] in names else 'unknown'}")


def _count(key: str, value: Any) -> int:
    return value if type(value) is int and 0 <= value < 1 << 63 else _refuse(key, value)


def _width(text: Any) -> int:
    return int(text) if text in set("2345678") else _refuse("width_bytes", text)


def _fixed_width(bits: Any) -> int:
    return bits if type(bits) is int and 2 <= bits <= 8 else _refuse("fixed_bits", bits)


def _text(key: str, value: Any) -> str:
    """A text to print: no control characters, not too long."""
    right = isinstance(value, str) and len(value) <= MOST_LETTERS and value.isprintable()
    return value if right else _refuse(key, value)


def _entries(key: str, values: dict[str, Any], kind: type) -> Any:
    found = values[key]
    return found if isinstance(found, kind) and len(found) <= MOST_ENTRIES else _refuse(key, found)  # type: ignore[arg-type]


def _texts(key: str, value: Any) -> tuple[str, ...]:
    return tuple(_text(key, text) for text in _entries(key, {key: value}, list))


def _float_layer(entry: Any) -> FloatLayer:
    _check_fields("a float layer of the report", entry, {each.name for each in fields(FloatLayer)})
    texts = {key: _text(key, entry[key]) for key in ("name", "type", "reason")}
    return FloatLayer(weights=_count("weights", entry["weights"]), **texts)
