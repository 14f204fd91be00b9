"""What a training run leaves behind, and the sums from which its rows are made."""

from dataclasses import dataclass, field
from typing import Any

from bitdial.train import distributed
from bitdial.train.step_report import StepReport

PART = "part "  # before the name of a part of the loss, among the sums


@dataclass
class History:
    """What a run leaves behind: a row per epoch, and samples of the scale gradients.

    A row has `epoch`, `lr`, `seconds`, and by width (as text, so that it is JSON) `loss`, `losses` (of a model that
    returns its own, by name), `train_top1` (if the targets are class labels), `top1` (if evaluated; `measured` by a measure of your own, None where not finite), `scale_rate`
    (mean ALRS rate) and `stopped` (share of steps at which that rate was 0). `gradients` has, by width, a list of
    {"step", "weight": per layer, "act": per layer}: the largest scale gradients. `ended` is why a callback ended the
    run early, None if none did.
    """

    layers: list[str]
    rows: list[dict[str, Any]] = field(default_factory=list)
    gradients: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    ended: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The history as JSON values; `ended` only if there is something to say."""
        whole = {"layers": self.layers, "rows": self.rows, "gradients": self.gradients}
        return whole if self.ended is None else {**whole, "ended": self.ended}

    def sample_gradients(self, step: int, report: StepReport) -> None:
        """Keep the largest scale gradients of a step."""
        for bits, peaks in report.weight_scale_peaks.items():
            act = report.act_scale_peaks[bits]
            entry = {"step": step, "weight": peaks.tolist(), "act": act.tolist()}
            self.gradients.setdefault(str(bits), []).append(entry)


class Totals:
    """Sums over the steps of one epoch, by width."""

    def __init__(self, saved: dict[str, Any] | None = None):
        self.sums: dict[str, dict[str, Any]] = saved or {}

    def add(self, report: StepReport) -> None:
        """Take a step into account."""
        for bits, loss in report.loss.items():
            mine = self.sums.setdefault(str(bits), {})
            rate = report.scale_rate.get(bits, report.lr)
            now = {"steps": 1, "loss": loss.double(), "rate": rate, "zero": rate == 0.0}
            if bits in report.correct:
                now |= {"right": report.correct[bits], "seen": report.seen}
            now |= {f"{PART}{name}": value.double() for name, value in report.parts.get(bits, {}).items()}
            for name, value in now.items():
                mine[name] = mine.get(name, 0.0) + value  # on a GPU, sums stay there until they are read

    def read(self) -> dict[str, dict[str, float]]:
        """The sums as plain numbers."""
        return {bits: {name: float(value) for name, value in sums.items()} for bits, sums in self.sums.items()}

    def row(self, epoch: int, lr: float, seconds: float) -> dict[str, Any]:
        """The epoch's row of the history."""
        items = self.read().items()
        right = {b: distributed.total(s.get("right", 0.0)) for b, s in items}
        seen = {b: distributed.total(s.get("seen", 0.0)) for b, s in items}
        return {
            "epoch": epoch,
            "lr": lr,
            "seconds": seconds,
            "loss": {b: s["loss"] / s["steps"] for b, s in items},
            **({"losses": parts} if (parts := {b: _parts(s) for b, s in items if _parts(s)}) else {}),
            "train_top1": {b: right[b] / seen[b] for b in right if seen[b]},
            "scale_rate": {b: s["rate"] / s["steps"] for b, s in items},
            "stopped": {b: s["zero"] / s["steps"] for b, s in items},
        }


def _parts(sums: dict[str, float]) -> dict[str, float]:
    """The means of the parts of the loss."""
    return {name.removeprefix(PART): v / sums["steps"] for name, v in sums.items() if name.startswith(PART)}
