"""Batch norms with several sets of parameters and statistics: by bit-width, or by the widths of two layers."""

import copy
from typing import Any

from torch import nn

from bitdial.config import check_choice

TRANSITIONS = ("full", "statistics")


class SwitchableBatchNorm(nn.Module):
    """One norm of any class per width in `sets`; the width is that of the weights of the layer named `follows`.

    Statistics differ from width to width, so sharing one set is what breaks low widths first. Each set is a copy of the
    whole norm: it computes as its class does, and all that it keeps is its own.
    """

    fed_by: str | None = None
    transitions: str | None = None

    def __init__(self, norm: nn.Module, *, bit_choices: tuple[int, ...], follows: str):
        super().__init__()
        self.follows = follows
        self.bit_choices = bit_choices
        self.sets = nn.ModuleDict({key: copy.deepcopy(norm) for key in self.set_names()})
        self.select_set(bit_choices[0])
        self.train(norm.training)

    def set_names(self) -> list[str]:
        """The names of the sets, in the order in which a file stores them."""
        return [str(bits) for bits in self.bit_choices]

    def holders(self, part: str) -> list[str]:
        """The names of the sets that have a tensor `part` of their own, in the order in which a file stores them."""
        return self.set_names()

    def row(self, part: str) -> int:
        """Which of `holders(part)`, counted from 0, has the tensor `part` that is in use."""
        return self.bit_choices.index(self.bits)

    def select_set(self, bits: int, fed_bits: int | None = None) -> None:
        """Change which set is in use: that of the own width; a transitional norm also goes by the feeding layer's."""
        self.bits, self.fed_bits = bits, bits if fed_bits is None else fed_bits

    @property
    def key(self) -> str:
        """The name of the set in use."""
        return str(self.bits)

    @property
    def active(self) -> nn.Module:
        """The set in use."""
        return self.sets[self.key]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Normalise with the set in use, which takes the same arguments."""
        return self.active(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """What models read of a norm (`num_features`, `running_mean`) is that of the set in use."""
        if name in self.__dict__.get("_modules", ()) or "sets" not in self.__dict__.get("_modules", ()):
            return super().__getattr__(name)
        return getattr(self.active, name)

    def extra_repr(self) -> str:
        return f"follows={self.follows!r}"


class TransitionalBatchNorm(SwitchableBatchNorm):
    """One norm for each pair: the width of the layer that feeds `follows`, and that of `follows` itself.

    In a mixed plan neighbours have different widths, and what a norm sees depends on both (Bit-Mixer). `fed_by` is the
    layer that feeds `follows`. `transitions` says what a pair has of its own: everything ("full"), or its statistics
    only ("statistics"). Then the pairs of one own width share weight and bias, which act on what is normalised already,
    and any other parameter of the norm; a pass in training mode is the same as with one set per width.
    """

    def __init__(self, norm: SwitchableBatchNorm, *, fed_by: str, transitions: str = "full"):
        """Starts every pair from the set that `norm` has for the own width."""
        check_choice("transitions", transitions, TRANSITIONS)
        super().__init__(norm.sets[norm.set_names()[0]], bit_choices=norm.bit_choices, follows=norm.follows)
        self.fed_by, self.transitions = fed_by, transitions
        self.shared = frozenset(n for n, _ in self.sets[self.key].named_parameters() if transitions == "statistics")
        for fed, own in self.pairs():
            self.sets[f"{fed}-{own}"].load_state_dict(norm.sets[str(own)].state_dict())
            holder, pair = self.sets[f"{self.bit_choices[0]}-{own}"], self.sets[f"{fed}-{own}"]
            for parameter in self.shared:
                module, _, name = parameter.rpartition(".")
                setattr(pair.get_submodule(module), name, holder.get_parameter(parameter))

    def pairs(self) -> list[tuple[int, int]]:
        """(width of the feeding layer, own width) of each set, in the order of `set_names`."""
        return [(fed, own) for fed in self.bit_choices for own in self.bit_choices]

    def set_names(self) -> list[str]:
        return [f"{fed}-{own}" for fed, own in self.pairs()]

    def holders(self, part: str) -> list[str]:
        return self.set_names()[: len(self.bit_choices)] if self._shares(part) else self.set_names()

    def row(self, part: str) -> int:
        own, fed = self.bit_choices.index(self.bits), self.bit_choices.index(self.fed_bits)
        return own if self._shares(part) else fed * len(self.bit_choices) + own

    def _shares(self, part: str) -> bool:
        """Whether the pairs of one own width share the tensor `part`, that of the first pair."""
        return part in self.shared

    @property
    def key(self) -> str:
        return f"{self.fed_bits}-{self.bits}"

    def extra_repr(self) -> str:
        return f"follows={self.follows!r}, fed_by={self.fed_by!r}, transitions={self.transitions!r}"
