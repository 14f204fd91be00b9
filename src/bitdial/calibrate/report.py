"""What a calibration did, block by block."""

from dataclasses import asdict, dataclass, field
from typing import Any, Self


@dataclass(frozen=True, kw_only=True)
class BlockReport:
    """One block: its layers, and by width how far its output is from the float model's.

    An error is |out - float out|^2 / |float out|^2 over all samples; pixels whose values are many times as large
    as elsewhere are held back. Each width is fed by what the blocks before it
    give at that width. `error_before` is that before weights were learned; empty if none were.
    """

    name: str
    layers: tuple[str, ...]
    error: dict[int, float]
    error_before: dict[int, float] = field(default_factory=dict)
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; `from_dict` gives an equal one back."""
        errors = {key: {str(b): v for b, v in getattr(self, key).items()} for key in ("error", "error_before")}
        return {**asdict(self), **errors, "layers": list(self.layers)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """What `to_dict` made `values` of."""
        errors = {key: {int(b): float(v) for b, v in values[key].items()} for key in ("error", "error_before")}
        return cls(name=values["name"], layers=tuple(values["layers"]), seconds=float(values["seconds"]), **errors)


@dataclass(frozen=True, kw_only=True)
class CalibrationReport:
    """What `calibrate` returns. `steps` are those that were taken, `samples` how many were calibrated on.

    `resumed` is how many blocks were done by an earlier run, whose seconds are not in `seconds`.
    """

    effort: str
    samples: int
    steps: tuple[str, ...]
    blocks: tuple[BlockReport, ...]
    seconds: float
    warnings: tuple[str, ...] = ()
    resumed: int = 0

    @property
    def error(self) -> dict[int, float]:
        """The relative error of the model's output, by width: that of the last block."""
        return dict(self.blocks[-1].error) if self.blocks else {}

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        blocks = [block.to_dict() for block in self.blocks]
        return {**vars(self), "blocks": blocks, "steps": list(self.steps), "warnings": list(self.warnings)}
