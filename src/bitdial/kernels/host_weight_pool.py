"""A pool whose master stays in host memory, so that a GPU holds the active words and little else.

A switch copies the master's words of the layers that change to the device, one layer after the other through one
staging buffer of the largest layer's size, and repacks each from there. What crosses the bus is `high` bits for each of
these weights. The active buffer has room for the widest choice at all times: addresses never change, so recorded CUDA
graphs stay valid, and a switch allocates nothing that could fail while a model serves.
"""

import logging
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from bitdial.kernels.ops import repack_
from bitdial.kernels.weight_pool import PackedWeightPool

log = logging.getLogger(__name__)


class HostWeightPool(PackedWeightPool):
    """A PackedWeightPool whose master lies in host memory, pinned if the device is a GPU and the system allows it."""

    on_device = ("active", "_blocks", "_layers", "_bits", "_held", "_staging", "_staged_layers")

    def _empty_master(self, words: int, words_of_largest: int) -> Tensor:
        self._staging = torch.empty(words_of_largest, dtype=torch.int32, device=self.device)
        self._staged_layers = self._layers.clone()
        self._staged_layers[:, 0] = 0  # there, the words of any layer begin at the beginning
        counts = self._blocks[:, 0].bincount().tolist()
        self._block_counts = list(zip(accumulate(counts, initial=0), counts, strict=False))  # (first, how many)
        return _host_buffer(words, pinned=self.device.type == "cuda")

    def fixed(self) -> list[Tensor]:
        return [*super().fixed(), self._staged_layers]

    def _upload(self, changed: Sequence[str]) -> None:
        for layer in (self.names[name] for name in changed):
            begin, _, count, _ = self._spans[layer]
            staged = self._staging[: self.high * count]
            staged.copy_(self.master[begin : begin + self.high * count], non_blocking=True)
            blocks, held = (table.narrow(0, *self._block_counts[layer]) for table in (self._blocks, self._held))
            repack_(
                staged, self.active, blocks, self._staged_layers, self._bits, held,
                self.high, self.bit_choices[0], self.scheme, self.ties,
            )  # fmt: skip

    def repack(self) -> None:
        """Bring the active words to the widths of the table, in place, layer by layer; it cannot be recorded."""
        self._upload(list(self.names))


def _host_buffer(words: int, *, pinned: bool) -> Tensor:
    if pinned:
        try:
            return torch.empty(words, dtype=torch.int32, pin_memory=True)
        except RuntimeError as problem:
            log.warning("%d bytes of host memory cannot be pinned, so switches are slower: %s", 4 * words, problem)
    return torch.empty(words, dtype=torch.int32)
