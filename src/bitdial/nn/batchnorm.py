"""Batch norm with one set of parameters and statistics per bit-width."""

import copy

from torch import Tensor, nn


class SwitchableBatchNorm(nn.Module):
    """One plain batch norm per width in `sets`; the width is that of the weights of the layer named `follows`.

    Statistics differ from width to width, so sharing one set is what breaks low widths first.
    """

    def __init__(self, norm: nn.Module, *, bit_choices: tuple[int, ...], follows: str):
        super().__init__()
        self.follows = follows
        self.bit_choices = bit_choices
        self.bits = bit_choices[0]
        self.sets = nn.ModuleDict({str(b): copy.deepcopy(norm) for b in bit_choices})
        self.train(norm.training)

    def select_set(self, bits: int) -> None:
        """Change which set is in use."""
        self.bits = bits

    def forward(self, x: Tensor) -> Tensor:
        """Normalise with the set of the selected width."""
        return self.sets[str(self.bits)](x)

    def extra_repr(self) -> str:
        return f"follows={self.follows!r}"
