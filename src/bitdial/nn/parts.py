"""New parameters that are parts of old ones."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Parts:
    """Makes parameters out of parts of others; the same part of the same parameter is made once, so ties stay ties.

    Without `values` they are allocated and not written, for a model whose weights are about to be replaced.
    """

    def __init__(self, *, values: bool = True):
        self.values = values
        self._made: dict[tuple[nn.Parameter, str], nn.Parameter] = {}

    def of(self, whole: nn.Parameter, name: str, take: Callable[[Tensor], Tensor]) -> nn.Parameter:
        """The part of `whole` that is called `name`: what `take` gives of it."""
        if (whole, name) not in self._made:
            part = take(whole.detach())
            own = part.clone(memory_format=torch.contiguous_format) if self.values else _like(part)
            self._made[whole, name] = nn.Parameter(own, whole.requires_grad)
        return self._made[whole, name]

    def third(self, whole: nn.Parameter, place: int) -> nn.Parameter:
        """One of the three equal parts of `whole` along dimension 0, counted from 0."""
        return self.of(whole, f"third {place}", lambda tensor: tensor.chunk(3)[place])

    def transposed(self, whole: nn.Parameter) -> nn.Parameter:
        """`whole`, a matrix, with its dimensions the other way round."""
        return self.of(whole, "transposed", Tensor.t)


def _like(part: Tensor) -> Tensor:
    return torch.empty_like(part, memory_format=torch.contiguous_format)
