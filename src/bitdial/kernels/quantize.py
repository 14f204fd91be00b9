"""Fake quantization on the fastest path the tensor's device has; the same signatures as in `bitdial.functional`.

On a GPU with Triton, one kernel forward and one backward; elsewhere the reference. Codes are equal on both. Under
autocast the kernels write the values in autocast's type at once, which saves the pass that would convert them.
"""

import functools
import importlib.util
import os
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bitdial import functional as bf

SECOND = {None: 0, "nearest even": 1, "nearest up": 2, "floor": 3}


class Rounding(NamedTuple):
    """A weight scheme as the kernels see it: widths, kind of the first and second rounding, offset of the values."""

    high: int
    low: int
    first_floor: bool
    second: int
    offset: float


def rounding_of(rule: bf.Scheme, high: int, low: int, ties: str) -> Rounding:
    """How `rule` rounds a weight to `low` bits by way of `high` bits."""
    second = f"nearest {ties}" if rule.second == "nearest" else rule.second
    return Rounding(high, low, rule.first == "floor", SECOND[second] if high > low else 0, rule.offset)


@functools.cache
def _triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def use_triton(tensor: Tensor) -> bool:
    """Whether the Triton kernels serve `tensor`: float32, bfloat16 or float16 on a GPU (or under the interpreter)."""
    here = tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"
    return here and tensor.dtype in (torch.float32, torch.bfloat16, torch.float16) and _triton_installed()


def value_type(x: Tensor) -> torch.dtype:
    """The type in which values go on: that of autocast, else float32."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else torch.float32


class _Activation(torch.autograd.Function):
    """`bitdial.functional`'s activation quantizer by Triton kernels."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor | None, bits: int, signed: bool, gradient_scale: float
    ) -> Tensor:
        from bitdial.kernels import triton_quantize

        x = _dense(x)
        whole = None if zero_point is None else bf.integer_zero_point(zero_point, bits)
        ctx.save_for_backward(x, scale, whole)
        ctx.range, ctx.gradient_scale = bf.code_range(bits, signed=signed), gradient_scale
        return triton_quantize.act_forward(x, scale, whole, ctx.range, value_type(x))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from bitdial.kernels import triton_quantize

        x, scale, whole = ctx.saved_tensors
        grad = _like(grads[0], x)
        grad_x, grad_scale, grad_zero = triton_quantize.act_backward(grad, x, scale, whole, ctx.range)
        grad_scale = (grad_scale * ctx.gradient_scale).reshape(scale.shape)
        if grad_zero is not None:
            grad_zero = (grad_zero * ctx.gradient_scale).reshape(scale.shape)
        return grad_x, grad_scale, grad_zero, None, None, None


def fake_quantize_activation(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    *,
    bits: int,
    kind: str,
    gradient_scale: float = 1.0,
) -> Tensor:
    """`x` as its `bits`-bit code says it, differentiable; see `bitdial.functional.fake_quantize_activation`."""
    if use_triton(x) and scale.dtype == torch.float32:
        bf.check_activation(bits, kind, zero_point)
        return bf.apply(_Activation, x, scale, zero_point, bits, kind == "signed", gradient_scale)
    with torch.autocast(x.device.type, enabled=False):
        return bf.fake_quantize_activation(
            x.to(scale.dtype), scale, zero_point, bits=bits, kind=kind, gradient_scale=gradient_scale
        )


class _Weight(torch.autograd.Function):
    """`bitdial.functional`'s weight quantizer by Triton kernels."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        scale: Tensor,
        high: int,
        low: int,
        rule: bf.Scheme,
        ties: str,
        gradient_scale: float,
    ) -> Tensor:
        from bitdial.kernels import triton_quantize

        ctx.rounding = rounding_of(rule, high, low, ties)
        ctx.unclipped, ctx.gradient_scale = bf.unclipped_range(rule, high, low), gradient_scale
        weight = _dense(weight)
        ctx.save_for_backward(weight, scale)
        return triton_quantize.weight_forward(weight, scale, ctx.rounding, value_type(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from bitdial.kernels import triton_quantize

        weight, scale = ctx.saved_tensors
        grad = _like(grads[0], weight)
        both = triton_quantize.weight_backward(grad, weight, scale, ctx.rounding, ctx.unclipped, ctx.gradient_scale)
        return *both, None, None, None, None, None


def fake_quantize(
    weight: Tensor,
    scale: Tensor,
    *,
    high: int,
    low: int,
    scheme: str = "double_rounding",
    ties: str = "even",
    gradient_scale: float = 1.0,
) -> Tensor:
    """`weight` as its `low`-bit code says it, differentiable; see `bitdial.functional.fake_quantize`."""
    rule = bf.scheme_of(scheme)
    if use_triton(weight) and weight.dtype == torch.float32 and rule.scale != "derived":
        bf.check_fake_quantize(high, low, scheme, ties)
        return bf.apply(_Weight, weight, scale, high, low, rule, ties, gradient_scale)
    return bf.fake_quantize(weight, scale, high=high, low=low, scheme=scheme, ties=ties, gradient_scale=gradient_scale)


def _dense(x: Tensor) -> Tensor:
    """`x` itself if its elements fill its memory without gaps or overlaps, in whatever order; else a copy."""
    if x.is_contiguous() or (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)):
        return x
    return x.contiguous()


def _like(grad: Tensor, x: Tensor) -> Tensor:
    """`grad` in the memory layout of `x`."""
    return grad if grad.stride() == x.stride() else torch.empty_like(x, dtype=grad.dtype).copy_(grad)
