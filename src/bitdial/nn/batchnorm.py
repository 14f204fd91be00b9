"""Batch norms with several sets of parameters and statistics: by bit-width, or by the widths of two layers."""

import copy
from typing import cast

from torch import Tensor, nn


class SwitchableBatchNorm(nn.Module):
    """One plain batch norm per width in `sets`; the width is that of the weights of the layer named `follows`.

    Statistics differ from width to width, so sharing one set is what breaks low widths first.
    """

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

    def forward(self, x: Tensor) -> Tensor:
        """Normalise with the set in use."""
        return cast(Tensor, self.active(x))

    def extra_repr(self) -> str:
        return f"follows={self.follows!r}"


class TransitionalBatchNorm(SwitchableBatchNorm):
    """One plain batch norm for each pair: the width of the layer that feeds `follows`, and that of `follows` itself.

    In a mixed plan neighbours have different widths, and what a norm sees depends on both (Bit-Mixer). `fed_by` is the
    layer that feeds `follows`.
    """

    def __init__(self, norm: SwitchableBatchNorm, *, fed_by: str):
        """Starts every pair from the set that `norm` has for the own width."""
        super().__init__(norm.sets[norm.set_names()[0]], bit_choices=norm.bit_choices, follows=norm.follows)
        self.fed_by = fed_by
        for fed, own in self.pairs():
            self.sets[f"{fed}-{own}"].load_state_dict(norm.sets[str(own)].state_dict())

    def pairs(self) -> list[tuple[int, int]]:
        """(width of the feeding layer, own width) of each set, in the order of `set_names`."""
        return [(fed, own) for fed in self.bit_choices for own in self.bit_choices]

    def set_names(self) -> list[str]:
        return [f"{fed}-{own}" for fed, own in self.pairs()]

    @property
    def key(self) -> str:
        return f"{self.fed_bits}-{self.bits}"

    def extra_repr(self) -> str:
        return f"follows={self.follows!r}, fed_by={self.fed_by!r}"
