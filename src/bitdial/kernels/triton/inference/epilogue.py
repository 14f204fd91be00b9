"""What follows a layer's sums in the same Triton kernel, and a kernel that does only that.

Norm, residual addition, ReLU and up to two quantizers, in float32 and in the order of `live.engines.exact`, each
operation rounded once: these kernels are compiled without contraction to multiply-adds. Everything is channels last.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bitdial.kernels.triton.training.quantize import FUSES

FINISH_BLOCK = 1024
# Adding 1.5 * 2^23 rounds a float32 below 2^22 to the nearest integer, ties to even, and leaves it in the low bits.
ROUNDS = tl.constexpr(12582912.0)
ROUNDS_BITS = tl.constexpr(0x4B400000)


class Finish(NamedTuple):
    """What follows a layer's sums: norm (2, channels), addition, ReLU, quantizers (see `kernels.integer_ops`)."""

    norm: Tensor | None
    other: Tensor | None
    cap: float | None
    first: Tensor | None
    second: Tensor | None
    keep: bool


@triton.jit
def _quantizer(quantizer_ptr, RELU: tl.constexpr):  # type: ignore[no-untyped-def]
    """What `_code` needs of a quantizer: to be read before anything is stored, and divided once.

    The lower bound of y is that of the codes times the scale: what lies below has the lowest code, and the quotient of
    the bound rounds to it. A ReLU is a bound too. The upper bound is that of the stored integers.
    """
    scale, zero, offset = tl.load(quantizer_ptr), tl.load(quantizer_ptr + 1), tl.load(quantizer_ptr + 4)
    low, most = (tl.load(quantizer_ptr + 2) - zero) * scale, (tl.load(quantizer_ptr + 3) - offset).to(tl.int32)
    if RELU:
        low = tl.maximum(low, 0.0)
    return scale, tl.div_rn(1.0, scale), low, most, (zero - offset).to(tl.int32) - ROUNDS_BITS


@triton.jit
def _quotient_to_round(x, scale, inverse):  # type: ignore[no-untyped-def]
    """A float32 that rounds to the integer to which x / scale, itself rounded as IEEE has it, does; up to 255 of them.

    One correction where `_quotient` has two. What it adds is wrong by at most 2^-22 of an ulp, so this is the IEEE
    quotient unless x / scale lies that close to the middle of two floats; and the integer is the same unless one of the
    two is some k + 1/2. For that, the low 16 bits of the scale's mantissa would have to be within 8 of 0: such scales
    are few enough for a test to try them all, and none fails.
    """
    if FUSES:
        ratio = x * inverse
        return tl.fma(tl.fma(ratio, -scale, x), inverse, ratio)
    else:
        return tl.div_rn(tl.minimum(x, 256.0 * scale), scale)  # numpy would warn of an overflow


@triton.jit
def _code(y, quantizer, LIMIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The stored int8 code of y, behind a ReLU up to LIMIT if there is one, by what `_quantizer` read.

    To add and to take the smaller is one instruction for integers. Of an infinite y the quotient is NaN, which on a GPU
    is the largest integer.
    """
    scale, inverse, low, most, shift = quantizer
    y = tl.maximum(y, low)
    if LIMIT is not None:
        y = tl.minimum(y, LIMIT)
    rounded = _quotient_to_round(y, scale, inverse) + ROUNDS
    return tl.minimum(rounded.to(tl.int32, bitcast=True) + shift, most).to(tl.int8)


@triton.jit
def _finish_tile(  # type: ignore[no-untyped-def]
    y,
    at,
    live,
    norm_ptr,
    multiplier,
    offset,
    other_ptr,
    first,
    second,
    value_ptr,
    codes_ptr,
    more_ptr,
    CAP: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """Norm, addition, ReLU and quantizers of the tile y, which lies at `at`; what is None is left out.

    A norm's numbers have been read: `multiplier` and `offset`.
    """
    if norm_ptr is not None:
        y = y * multiplier
        y = y + offset
    if other_ptr is not None:
        y = y + tl.load(other_ptr + at, mask=live, other=0.0)
    if value_ptr is not None:
        value = y
        if CAP:
            value = tl.maximum(value, 0.0)
        if LIMIT is not None:
            value = tl.minimum(value, LIMIT)
        tl.store(value_ptr + at, value, mask=live)
    if first is not None:
        tl.store(codes_ptr + at, _code(y, first, LIMIT), mask=live)
    if second is not None:
        tl.store(more_ptr + at, _code(y, second, LIMIT), mask=live)


@triton.jit
def _finish(  # type: ignore[no-untyped-def]
    x_ptr,
    norm_ptr,
    other_ptr,
    first_ptr,
    second_ptr,
    value_ptr,
    codes_ptr,
    more_ptr,
    count,
    K: tl.constexpr,
    CAP: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < count
    first = first_ptr if first_ptr is None else _quantizer(first_ptr, CAP)
    second = second_ptr if second_ptr is None else _quantizer(second_ptr, CAP)
    y = tl.load(x_ptr + at, mask=live, other=0.0)
    multiplier, offset = y, y
    if norm_ptr is not None:
        multiplier, offset = tl.load(norm_ptr + at % K), tl.load(norm_ptr + K + at % K)
    _finish_tile(
        y, at, live, norm_ptr, multiplier, offset, other_ptr, first, second, value_ptr, codes_ptr, more_ptr, CAP, LIMIT
    )


def finish_value(x: Tensor, finish: Finish) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Value and codes after the float32 x, which is channels last (N, C, H, W) or contiguous (..., C)."""
    outputs = outputs_for(tuple(x.shape), x.device, finish)
    channels = x.shape[1] if x.dim() == 4 else x.shape[-1]
    _finish[(triton.cdiv(x.numel(), FINISH_BLOCK),)](
        x, *finish_operands(finish), *outputs, x.numel(), channels, **ending(finish.cap), BLOCK=FINISH_BLOCK,
        enable_fp_fusion=False,
    )  # fmt: skip
    return outputs


def finish_operands(finish: Finish) -> tuple[Tensor | None, ...]:
    """The tensors that the kernels read at the end of a tile, in their order."""
    return finish.norm, finish.other, finish.first, finish.second


def ending(cap: float | None) -> dict[str, object]:
    """The constants of a ReLU up to `cap`, or of none."""
    return {"CAP": cap is not None, "LIMIT": None if cap is None or math.isinf(cap) else cap}


def outputs_for(
    shape: tuple[int, ...], device: torch.device, finish: Finish
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Memory for what `finish` asks for: value, codes, more codes."""
    layout = torch.channels_last if len(shape) == 4 else torch.contiguous_format

    def made(wanted: bool, dtype: torch.dtype) -> Tensor | None:
        return torch.empty(shape, dtype=dtype, device=device, memory_format=layout) if wanted else None

    first, second = (made(quantizer is not None, torch.int8) for quantizer in (finish.first, finish.second))
    return made(finish.keep, torch.float32), first, second
