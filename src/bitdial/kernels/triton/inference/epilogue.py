"""The epilogue of a layer's sums in the same Triton kernel, and a kernel that does only that.

The steps of `kernels.epilogue`, in float32, each operation rounded once: these kernels are compiled without contraction
to multiply-adds. Everything is channels last.
"""

import math

import triton
import triton.language as tl
from torch import Tensor

from bitdial.kernels.epilogue import Epilogue
from bitdial.kernels.triton.training.quantize import FUSES

EPILOGUE_BLOCK = 1024
# Adding 1.5 * 2^23 rounds a float32 below 2^22 to the nearest integer, ties to even, and leaves it in the low bits.
ROUNDS = tl.constexpr(12582912.0)
ROUNDS_BITS = tl.constexpr(0x4B400000)


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
def _code(y, quantizer, RELU_MAX: tl.constexpr):  # type: ignore[no-untyped-def]
    """The stored int8 code of y, behind a ReLU up to RELU_MAX if there is one, by what `_quantizer` read.

    To add and to take the smaller is one instruction for integers. Of an infinite y the quotient is NaN, which on a GPU
    is the largest integer.
    """
    scale, inverse, low, most, shift = quantizer
    y = tl.maximum(y, low)
    if RELU_MAX is not None:
        y = tl.minimum(y, RELU_MAX)
    rounded = _quotient_to_round(y, scale, inverse) + ROUNDS
    return tl.minimum(rounded.to(tl.int32, bitcast=True) + shift, most).to(tl.int8)


@triton.jit
def _epilogue_tile(  # type: ignore[no-untyped-def]
    y,
    at,
    live,
    norm_affine_ptr,
    multiplier,
    offset,
    residual_ptr,
    quantizer_a,
    quantizer_b,
    value_ptr,
    codes_a_ptr,
    codes_b_ptr,
    RELU: tl.constexpr,
    RELU_MAX: tl.constexpr,
):
    """Norm, addition, ReLU and quantizers of the tile y, which lies at `at`; what is None is left out.

    A norm's numbers have been read: `multiplier` and `offset`.
    """
    if norm_affine_ptr is not None:
        y = y * multiplier
        y = y + offset
    if residual_ptr is not None:
        y = y + tl.load(residual_ptr + at, mask=live, other=0.0)
    if value_ptr is not None:
        value = y
        if RELU:
            value = tl.maximum(value, 0.0)
        if RELU_MAX is not None:
            value = tl.minimum(value, RELU_MAX)
        tl.store(value_ptr + at, value, mask=live)
    if quantizer_a is not None:
        tl.store(codes_a_ptr + at, _code(y, quantizer_a, RELU_MAX), mask=live)
    if quantizer_b is not None:
        tl.store(codes_b_ptr + at, _code(y, quantizer_b, RELU_MAX), mask=live)


@triton.jit
def _channel_numbers(by_channel, channel, used, K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Correction, factor, bias and norm of the channels (1, channels); of what is None, the factor once more."""
    correction_ptr, factor_ptr, bias_ptr, norm_affine_ptr = by_channel
    factor = tl.load(factor_ptr + channel, mask=used, other=0.0)
    bias, multiplier, offset = factor, factor, factor
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + channel, mask=used, other=0.0)
    if norm_affine_ptr is not None:
        multiplier = tl.load(norm_affine_ptr + channel, mask=used, other=0.0)
        offset = tl.load(norm_affine_ptr + K + channel, mask=used, other=0.0)
    return tl.load(correction_ptr + channel, mask=used, other=0), factor, bias, multiplier, offset


@triton.jit
def _sums_epilogue(  # type: ignore[no-untyped-def]
    sums,
    p,
    pixels,
    channel,
    used,
    by_channel,
    numbers,
    residual_ptr,
    quantizer_a,
    quantizer_b,
    outs,
    K: tl.constexpr,
    RELU: tl.constexpr,
    RELU_MAX: tl.constexpr,
):
    """The epilogue of the sums (pixels, channels) of the output pixels p, by the `numbers` of these channels."""
    _, _, bias_ptr, norm_affine_ptr = by_channel
    correction, factor, bias, multiplier, offset = numbers
    value_ptr, codes_a_ptr, codes_b_ptr = outs
    y = (sums + correction).to(tl.float32) * factor
    if bias_ptr is not None:
        y = y + bias
    _epilogue_tile(
        y, p[:, None] * K + channel, (p < pixels)[:, None] & used, norm_affine_ptr, multiplier, offset, residual_ptr,
        quantizer_a, quantizer_b, value_ptr, codes_a_ptr, codes_b_ptr, RELU, RELU_MAX,
    )  # fmt: skip


@triton.jit
def _epilogue(  # type: ignore[no-untyped-def]
    x_ptr,
    norm_affine_ptr,
    residual_ptr,
    quantizer_a_ptr,
    quantizer_b_ptr,
    value_ptr,
    codes_a_ptr,
    codes_b_ptr,
    count,
    K: tl.constexpr,
    RELU: tl.constexpr,
    RELU_MAX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < count
    quantizer_a = quantizer_a_ptr if quantizer_a_ptr is None else _quantizer(quantizer_a_ptr, RELU)
    quantizer_b = quantizer_b_ptr if quantizer_b_ptr is None else _quantizer(quantizer_b_ptr, RELU)
    y = tl.load(x_ptr + at, mask=live, other=0.0)
    multiplier, offset = y, y
    if norm_affine_ptr is not None:
        multiplier, offset = tl.load(norm_affine_ptr + at % K), tl.load(norm_affine_ptr + K + at % K)
    _epilogue_tile(
        y, at, live, norm_affine_ptr, multiplier, offset, residual_ptr, quantizer_a, quantizer_b, value_ptr,
        codes_a_ptr, codes_b_ptr, RELU, RELU_MAX,
    )  # fmt: skip


def apply_epilogue(x: Tensor, epilogue: Epilogue) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Value and codes after the float32 x, which is channels last (N, C, H, W) or contiguous (..., C)."""
    outputs = epilogue.outputs(x.shape, x.device)
    channels = x.shape[1] if x.dim() == 4 else x.shape[-1]
    _epilogue[(triton.cdiv(x.numel(), EPILOGUE_BLOCK),)](
        x, *epilogue_tensors(epilogue), *outputs, x.numel(), channels, **relu_constants(epilogue.relu_max),
        BLOCK=EPILOGUE_BLOCK, enable_fp_fusion=False,
    )  # fmt: skip
    return outputs


def epilogue_tensors(epilogue: Epilogue) -> tuple[Tensor | None, ...]:
    """The tensors that the kernels read at the end of a tile, in their order."""
    return epilogue.norm_affine, epilogue.residual, epilogue.quantizer_a, epilogue.quantizer_b


def relu_constants(relu_max: float | None) -> dict[str, object]:
    """The constants of a ReLU up to `relu_max`, or of none."""
    return {"RELU": relu_max is not None, "RELU_MAX": None if relu_max is None or math.isinf(relu_max) else relu_max}
