"""What a kernel does with a layer's sums before it writes anything: the epilogue, and the outputs that it leaves.

In float32 and in this order, each operation rounded once:

    y = y * norm_affine[0] + norm_affine[1]       a batch norm, by channel
    y = y + residual
    y = min(max(y, 0), relu_max)                  relu_max = inf: a plain ReLU
    codes_a, codes_b = quantised y                for up to two layers that read it

Codes travel as int8, channels last: those of an unsigned kind less STORED_SHIFT, those of a signed kind as they are. A
quantizer is a tensor of QUANTIZER_NUMBERS float32: scale, zero-point, least and largest code, and what is subtracted
for storing. All that depends on a width is read from tensors, never from arguments, so a recorded CUDA graph follows
the dial as long as its tensors stay where they are.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

QUANTIZER_NUMBERS = 5
STORED_SHIFT = 128  # of codes of an unsigned kind

Outputs = tuple[Tensor, Tensor, Tensor]  # value, codes_a, codes_b; what was not asked for is empty


class Epilogue(NamedTuple):
    """Each step of the epilogue; None leaves it out. The fields are in the order of the operators' arguments."""

    norm_affine: Tensor | None = None  # (2, channels): multiplier and offset
    residual: Tensor | None = None  # like the output
    relu_max: float | None = None
    quantizer_a: Tensor | None = None
    quantizer_b: Tensor | None = None
    keep_value: bool = True  # whether y itself is an output

    def arranged(self, shape: Sequence[int]) -> "Epilogue":
        """The same, with the residual in the memory layout of an output of this shape."""
        if self.residual is None:
            return self
        assert tuple(self.residual.shape) == tuple(shape), "the caller adds tensors of other shapes itself"
        return self._replace(residual=arranged(self.residual))

    def outputs(self, shape: Sequence[int], device: torch.device) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Memory for value, codes_a and codes_b of this shape, channels last; None for what is not asked for."""
        layout = torch.channels_last if len(shape) == 4 else torch.contiguous_format

        def made(wanted: bool, dtype: torch.dtype) -> Tensor | None:
            return torch.empty(shape, dtype=dtype, device=device, memory_format=layout) if wanted else None

        codes_a, codes_b = (
            made(quantizer is not None, torch.int8) for quantizer in (self.quantizer_a, self.quantizer_b)
        )
        return made(self.keep_value, torch.float32), codes_a, codes_b


def filled(outputs: tuple[Tensor | None, Tensor | None, Tensor | None], device: torch.device) -> Outputs:
    """`outputs` with empty tensors for what was not asked for: operators return tensors."""
    types = (torch.float32, torch.int8, torch.int8)
    value, codes_a, codes_b = (
        torch.empty(0, dtype=dtype, device=device) if out is None else out
        for out, dtype in zip(outputs, types, strict=True)
    )
    return value, codes_a, codes_b


def channels_last(x: Tensor) -> Tensor:
    """x with its channels last in memory."""
    return x.contiguous(memory_format=torch.channels_last)


def arranged(x: Tensor) -> Tensor:
    """x in the memory layout of outputs: images channels last, others contiguous."""
    return channels_last(x) if x.dim() == 4 else x.contiguous()
