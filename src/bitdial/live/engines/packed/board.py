"""The switchboard of a model whose packed weights lie in one pool: all of them change by one call."""

import copy
from typing import Any, cast

from torch import Tensor, nn

from bitdial.dial.dial import SWITCHBOARD, Board, Selection
from bitdial.kernels.weight_pool import PackedWeightPool
from bitdial.live.engines.packed.words import PooledWords
from bitdial.live.layers import LiveLayer


class PoolBoard(Board[Selection]):
    """Switches the layers in `pool` by one call of its `set_bits`, others one by one."""

    def __init__(self, pool: PackedWeightPool):
        super().__init__()
        self.pool = pool

    def __deepcopy__(self, memo: dict[int, Any]) -> "PoolBoard":
        """A board with a pool of its own, which is there before the layers that take their words from it."""
        new = memo[id(self)] = PoolBoard(copy.deepcopy(self.pool, memo))
        new.layers, new.followers = copy.deepcopy((self.layers, self.followers), memo)
        return new

    def attach(self, model: nn.Module) -> None:
        """Be what `set_bits` switches `model` by."""
        self.register(model)
        setattr(model, SWITCHBOARD, self)

    def fixed(self) -> list[Tensor]:
        return self.pool.fixed()

    def forget(self) -> None:
        self.pool.forget()

    def _steps(self, chosen: Selection) -> Selection:
        return chosen

    def _apply(self, steps: Selection) -> None:
        self.pool.set_bits({name: bits for name, (bits, _) in steps.items() if name in self.pool.names})
        for name, pair in steps.items():
            if name in self.pool.names:
                layer = cast(LiveLayer, self.layers[name])
                cast(PooledWords, layer.codes.source).take(pair[0])
                vars(layer).update(weight_bits=pair[0], act_bits=pair[1])
            else:
                self.select(name, *pair)
