"""Layers on integer codes as PyTorch operators: each declared once, with its schema, its fake and its reference.

    integer_conv2d   a convolution (or linear layer: 1x1) of codes, and what follows it
    integer_finish   what follows a float32 value: norm, addition, ReLU, quantizers
    integer_sums     the sums of a convolution alone, for compilers on the CPU: there `run_conv2d` and `run_finish` say
                     the rest in plain PyTorch, of which they make one loop

The first two give (value, codes, more): the float32 value if `keep`, and its codes by the quantizers `first` and
`second`; what was not asked for is empty. Results equal those of `live.engines.exact` bit for bit on every path: Triton
kernels on a GPU, oneDNN's integer products on the CPU where they are exact, else sums in float64.

Codes travel as int8, channels last: those of an unsigned kind less 128, those of a signed kind as they are. A quantizer
is a tensor of QUANTIZER_NUMBERS float32: scale, zero-point, least and largest code, and what is subtracted for storing.
All that depends on a width is read from tensors, never from arguments, so a recorded CUDA graph follows the dial as
long as its tensors stay where they are.
"""

import functools
import math
import os

import torch
from torch import Tensor

from bitdial.kernels.fake_quantize import _triton_installed
from bitdial.kernels.reference.integer_sums import float64_sums, lowered, output_shape, raised, sums_by_torch

QUANTIZER_NUMBERS = 5
STORED_SHIFT = 128  # of codes of an unsigned kind
MOST_TERMS = (2**31 - 1) // 255**2  # products of 8-bit numbers whose sum fits int32
INDEXABLE = 2**31
NEEDED_CAPABILITY = (8, 0)  # int8 tensor cores that Triton knows

Outputs = tuple[Tensor, Tensor, Tensor]


@functools.cache
def missing_on(device: torch.device) -> str | None:
    """What `device` lacks for the Triton kernels; None if it lacks nothing."""
    if not _triton_installed():
        return "Triton is not installed"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None
    if device.type != "cuda":
        return "it is no GPU"
    capability = torch.cuda.get_device_capability(device)
    if capability < NEEDED_CAPABILITY:
        return f"its compute capability is {capability[0]}.{capability[1]}, below {NEEDED_CAPABILITY[0]}.0"
    return None


@torch.library.custom_op("bitdial::integer_conv2d", mutates_args=())
def integer_conv2d(
    x: Tensor,
    weight: Tensor,
    pad: Tensor,
    correction: Tensor,
    factor: Tensor,
    halves: Tensor | None,
    bias: Tensor | None,
    norm: Tensor | None,
    other: Tensor | None,
    first: Tensor | None,
    second: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    cap: float | None,
    keep: bool,
) -> Outputs:
    """The convolution of stored codes x (N, C, H, W) with integers weight (K, R, S, C / groups), and what follows.

    `pad` (PAD_CODES,) holds the stored code of 0, `correction` (K,) is -pad times the sum of the filter's integers,
    `factor` (K,) float32(act_scale * weight_step). The weight's integer is `weight`; but 2 * weight + 1 while `halves`
    (1,), int32, is 1 and not 0. None says that it never is.
    Then `bias` (K,), `norm` (2, K): multiplier and offset, `other` (like the output), ReLU up to `cap`, quantizers.
    """
    sizes = output_shape(x, weight, stride, padding, dilation)
    terms, elements = math.prod(weight.shape[1:]), max(x.numel(), math.prod(sizes))
    if not elements or not x.numel() or terms > MOST_TERMS or elements >= INDEXABLE:
        sums = float64_sums(x, weight, pad, stride, padding, dilation, groups, halves)
    elif missing_on(x.device) is None:
        from bitdial.kernels.triton.inference import integer as kernels
        from bitdial.kernels.triton.inference.epilogue import Finish
        from bitdial.kernels.triton.inference.tiles import Geometry

        x = channels_last(x)
        steps, zeros, spread = ((s[0], s[1]) for s in (stride, padding, dilation))
        geometry = Geometry.of(x, weight, steps, zeros, spread, groups)
        finish = Finish(norm, like(other, sizes), cap, first, second, keep)
        with torch.cuda.device_of(x):
            outputs = kernels.convolve(x, weight, pad, correction, factor, halves, bias, finish, geometry)
        return filled(outputs, x.device)
    else:
        sums = sums_by_torch(x, weight, pad, correction, stride, padding, dilation, groups, halves)
    return scaled_and_finished(channels_last(sums.float()), factor, bias, norm, other, first, second, cap, keep)


@integer_conv2d.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    pad: Tensor,
    correction: Tensor,
    factor: Tensor,
    halves: Tensor | None,
    bias: Tensor | None,
    norm: Tensor | None,
    other: Tensor | None,
    first: Tensor | None,
    second: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    cap: float | None,
    keep: bool,
) -> Outputs:
    return empty_outputs(output_shape(x, weight, stride, padding, dilation), x.device, first, second, keep)


@torch.library.custom_op("bitdial::integer_finish", mutates_args=())
def integer_finish(
    x: Tensor,
    norm: Tensor | None,
    other: Tensor | None,
    first: Tensor | None,
    second: Tensor | None,
    cap: float | None,
    keep: bool,
) -> Outputs:
    """What follows the float32 x: `norm` over the channels of (N, C, H, W) or (..., C), and so on as above."""
    if missing_on(x.device) is not None or not 0 < x.numel() < INDEXABLE:
        return finish_by_torch(_arranged(x).clone(), norm, other, first, second, cap, keep)
    from bitdial.kernels.triton.inference import epilogue as kernels

    finish = kernels.Finish(norm, like(other, list(x.shape)), cap, first, second, keep)
    with torch.cuda.device_of(x):
        return filled(kernels.finish_value(_arranged(x), finish), x.device)


@integer_finish.register_fake
def _(
    x: Tensor,
    norm: Tensor | None,
    other: Tensor | None,
    first: Tensor | None,
    second: Tensor | None,
    cap: float | None,
    keep: bool,
) -> Outputs:
    return empty_outputs(list(x.shape), x.device, first, second, keep)


@torch.library.custom_op("bitdial::integer_sums", mutates_args=())
def integer_sums(
    x: Tensor,
    weight: Tensor,
    pad: Tensor,
    correction: Tensor,
    halves: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    """The sums of `integer_conv2d` as float32, each rounded once, channels last; x are raised codes, uint8."""
    if not x.numel() or math.prod(weight.shape[1:]) > MOST_TERMS:
        return channels_last(float64_sums(lowered(x), weight, pad, stride, padding, dilation, groups, halves).float())
    return sums_by_torch(x, weight, pad, correction, stride, padding, dilation, groups, halves)


@integer_sums.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    pad: Tensor,
    correction: Tensor,
    halves: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    sizes = output_shape(x, weight, stride, padding, dilation)
    return torch.empty(sizes, dtype=torch.float32, device=x.device, memory_format=torch.channels_last)


def run_conv2d(
    x: Tensor,
    weight: Tensor,
    pad: Tensor,
    correction: Tensor,
    factor: Tensor,
    halves: Tensor | None,
    bias: Tensor | None,
    norm: Tensor | None,
    other: Tensor | None,
    first: Tensor | None,
    second: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    cap: float | None,
    keep: bool,
) -> Outputs:
    """`integer_conv2d`, or its parts for a compiler."""
    moves = (stride, padding, dilation, groups)
    if in_parts(x):
        sums = integer_sums(raised(x), weight, pad, correction, halves, *moves)
        return scaled_and_finished(sums, factor, bias, norm, other, first, second, cap, keep)
    return integer_conv2d(
        x, weight, pad, correction, factor, halves, bias, norm, other, first, second, *moves, cap, keep
    )


def run_finish(
    x: Tensor,
    norm: Tensor | None,
    other: Tensor | None,
    first: Tensor | None,
    second: Tensor | None,
    cap: float | None,
    keep: bool,
) -> Outputs:
    """`integer_finish`, or its parts for a compiler."""
    if in_parts(x):
        return finish_by_torch(_arranged(x).clone(), norm, other, first, second, cap, keep)
    return integer_finish(x, norm, other, first, second, cap, keep)


def in_parts(x: Tensor) -> bool:
    """Whether a compiler on the CPU is to see plain PyTorch instead of an operator."""
    return torch.compiler.is_compiling() and x.device.type == "cpu"


# --- shapes and layouts -------------------------------------------------------------------------


def channels_last(x: Tensor) -> Tensor:
    """x with its channels last in memory."""
    return x.contiguous(memory_format=torch.channels_last)


def _arranged(x: Tensor) -> Tensor:
    return channels_last(x) if x.dim() == 4 else x.contiguous()


def like(other: Tensor | None, sizes: list[int]) -> Tensor | None:
    """`other` in the memory layout of an output of these sizes."""
    assert other is None or list(other.shape) == sizes, "the caller adds tensors of other shapes itself"
    return None if other is None else _arranged(other)


def filled(outputs: tuple[Tensor | None, Tensor | None, Tensor | None], device: torch.device) -> Outputs:
    """`outputs` with empty tensors for what was not asked for."""
    types = (torch.float32, torch.int8, torch.int8)
    value, codes, more = (
        torch.empty(0, dtype=dtype, device=device) if out is None else out
        for out, dtype in zip(outputs, types, strict=True)
    )
    return value, codes, more


def empty_outputs(
    shape: list[int], device: torch.device, first: Tensor | None, second: Tensor | None, keep: bool
) -> Outputs:
    """Outputs of this shape, not filled."""
    layout = torch.channels_last if len(shape) == 4 else torch.contiguous_format

    def made(wanted: bool, dtype: torch.dtype) -> Tensor | None:
        return torch.empty(shape, dtype=dtype, device=device, memory_format=layout) if wanted else None

    codes, more = (made(quantizer is not None, torch.int8) for quantizer in (first, second))
    return filled((made(keep, torch.float32), codes, more), device)


# --- what follows a sum, by PyTorch ---------------------------------------------------------------


def scaled_and_finished(
    sums: Tensor,
    factor: Tensor,
    bias: Tensor | None,
    norm: Tensor | None,
    other: Tensor | None,
    first: Tensor | None,
    second: Tensor | None,
    cap: float | None,
    keep: bool,
) -> Outputs:
    """What follows the float32 sums, which lie as outputs do and are overwritten, by PyTorch."""
    y = sums.mul_(factor.view(-1, 1, 1))
    if bias is not None:
        y.add_(bias.view(-1, 1, 1))
    return finish_by_torch(y, norm, other, first, second, cap, keep)


def finish_by_torch(
    y: Tensor,
    norm: Tensor | None,
    other: Tensor | None,
    first: Tensor | None,
    second: Tensor | None,
    cap: float | None,
    keep: bool,
) -> Outputs:
    """What follows the float32 y, which lies as outputs do and is overwritten, by PyTorch."""
    if norm is not None:
        multiplier, offset = (line.view(-1, 1, 1) if y.dim() == 4 else line for line in norm)
        y.mul_(multiplier).add_(offset)
    if other is not None:
        y.add_(other)
    if cap is not None:
        y.clamp_(0.0, None if math.isinf(cap) else cap)
    codes, more = (None if quantizer is None else _stored_codes(y, quantizer) for quantizer in (first, second))
    return filled((y if keep else None, codes, more), y.device)


def _stored_codes(y: Tensor, quantizer: Tensor) -> Tensor:
    """Stored codes (int8) of the float32 y."""
    scale, zero, least, most, shift = quantizer
    return (y / scale).round_().add_(zero).clamp_(least, most).sub_(shift).to(torch.int8)
