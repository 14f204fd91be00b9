"""Which norms of a model get a set for each width, and why others do not."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import nn

from bitdial.dial.plan import shortened
from bitdial.nn import is_switchable, keeps_own_statistics, unswitchable_reason


@dataclass
class Norms:
    """The norms of a model that keep statistics: those to `switch`, and why the others are `kept` as they are."""

    switch: dict[str, nn.Module] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)

    def holder(self, name: str) -> str | None:
        """The norm to switch that module `name` is a part of: each set has a copy of it."""
        parents = (name[:at] for at, letter in enumerate(name) if letter == ".")
        return next((parent for parent in parents if parent in self.switch), None)

    def keep_unconnected(self, connected: Iterable[str]) -> None:
        """Keep the norms that are not `connected` with a quantised layer, in place."""
        for name in sorted(set(self.switch) - set(connected)):
            self.kept[name] = "no quantised layer that bitdial can see feeds it or reads it"
            del self.switch[name]


def find_norms(model: nn.Module, *, switch_norms: bool) -> Norms:
    """The norms of `model`."""
    found = Norms()
    for name, module in model.named_modules():
        if found.holder(name) is not None:
            continue
        if is_switchable(module):
            reason = unswitchable_reason(module) if switch_norms else "switch_norms=False"
            if reason is None:
                found.switch[name] = module
            else:
                found.kept[name] = reason
        elif keeps_own_statistics(module):
            found.kept[name] = (
                f"a {type(module).__name__} is not derived from a norm of PyTorch; derive it from nn.BatchNorm2d or "
                "the like, which can have a set per width"
            )
    return found


def warnings_of_kept(norms: Norms) -> list[str]:
    """Which norms have one set of statistics for all widths, and why; nothing of those that are meant to."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in norms.kept.items():
        if reason != "switch_norms=False":
            by_reason.setdefault(reason, []).append(name)
    return [
        f"{len(names)} norms ({shortened(names, most=20)}) have one set of statistics for all widths, which costs "
        f"accuracy at low ones: {reason}"
        for reason, names in by_reason.items()
    ]
