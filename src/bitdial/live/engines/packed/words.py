"""Codes packed into words: b bits a weight in memory, as the packed kernels read them."""

import copy
from typing import Any, Self

from torch import Tensor, nn

from bitdial.kernels.kept_layouts import forget, held_for
from bitdial.kernels.weight_pool import PackedWeightPool
from bitdial.kernels.word_layout import packed_fields, unpack_words


class NestedWords(nn.Module):
    """Words of a scheme whose low codes are prefixes: one buffer for every width, a switch changes nothing here."""

    words: Tensor

    def __init__(self, words: Tensor, fields: tuple[int, ...], shape: tuple[int, int]):
        """`words` of codes (rows, columns) in `fields`.

        It has a tensor of its own on their memory, since a backend keeps one layout for each: see `kept_layouts`.
        """
        super().__init__()
        self.register_buffer("words", words.detach())
        self.fields, self.shape, self.widest = fields, shape, sum(fields)

    def select(self, bits: int) -> None:
        """Nothing is to be done."""

    def read(self, bits: int) -> tuple[Tensor, int]:
        """The codes at `bits`, or at the widest that is held."""
        bits = min(bits, self.widest)
        return unpack_words(self.words, self.fields, bits, *self.shape), bits

    def tensors(self) -> dict[str, list[Tensor]]:
        """They are what a layer uses, or what the CPU has made of them."""
        return {"active": [self.words, *held_for(self.words)]}

    def __deepcopy__(self, memo: dict[int, Any]) -> "NestedWords":
        """Words of its own, or for a view a tensor of its own on the same memory."""
        new = memo[id(self)] = NestedWords(copy.deepcopy(self.words, memo), self.fields, self.shape)
        return new.train(self.training)


class PooledWords(nn.Module):
    """Words of a scheme that rounds anew at each width: they lie in the pool of the whole model.

    They are part of no state_dict: the artifact is the form in which a model is kept.
    """

    bits: int
    words: Tensor
    fields: tuple[int, ...]

    def __init__(self, board: Any, name: str, bits: int):
        """The words of the layer called `name`, at `bits`, in the pool of `board`, a PoolBoard."""
        super().__init__()
        self.board, self.name = board, name
        self.take(bits)

    @property
    def pool(self) -> PackedWeightPool:
        """The pool, which the board has."""
        pool: PackedWeightPool = self.board.pool
        return pool

    def take(self, bits: int) -> None:
        """Use the words that the pool has for this layer now, at `bits`."""
        state, words = vars(self), self.pool.words(self.name)  # setting attributes of modules takes far longer
        if state.get("words", words) is not words:
            forget(state["words"])
        state["bits"], state["words"], state["fields"] = bits, words, packed_fields(bits)

    def select(self, bits: int) -> None:
        """Switch this layer alone."""
        self.pool.set_bits({self.name: bits})
        self.take(bits)

    def read(self, bits: int) -> tuple[Tensor, int]:
        """The stored codes, whatever is asked for."""
        return self.pool.stored_codes(self.name), self.pool.high

    def tensors(self) -> dict[str, list[Tensor]]:
        """Those of the whole pool."""
        pool = self.pool
        master = "master" if "master" in pool.on_device else "host_master"
        held = [getattr(pool, part) for part in pool.on_device]
        return {"active": [pool.active, *held_for(self.words)], master: [pool.master], "other": held}

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self.pool.move(fn(self.pool.active[:0]).device)
        self.take(self.bits)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "words"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.take(self.bits)  # of its own pool: a copy of the model has one too
