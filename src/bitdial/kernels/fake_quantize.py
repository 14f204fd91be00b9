"""Fake quantization on the fastest path the tensor's device has; the same signatures as in `bitdial.functional`.

On a GPU with Triton, one kernel forward and one backward; elsewhere, and for activations with a scale for each token,
the reference. Codes are equal on both. Under autocast the kernels write the values in autocast's type at once, which
saves the pass that would convert them.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bitdial import functional as bf
from bitdial.kernels.dispatch import use_triton
from bitdial.kernels.width_table import ActivationCodes, WeightCodes


def value_type(x: Tensor) -> torch.dtype:
    """The type in which values go on: that of autocast, else float32."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else torch.float32


class _Activation(torch.autograd.Function):
    """`bitdial.functional`'s activation quantizer by Triton kernels; `whole` is the zero-point as an integer."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor | None, whole: Tensor | None, codes: ActivationCodes
    ) -> Tensor:
        from bitdial.kernels.triton.training import quantize as triton_quantize

        x = dense(x)
        ctx.save_for_backward(x, scale, whole)
        ctx.codes = codes
        return triton_quantize.act_forward(x, codes, whole, value_type(x))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from bitdial.kernels.triton.training import quantize as triton_quantize

        x, scale, whole = ctx.saved_tensors
        grad = like(grads[0], x)
        grad_x, *sums = triton_quantize.act_backward(grad, x, ctx.codes, whole)
        grad_scale, grad_zero = (None if s is None else s.reshape(scale.shape) for s in sums)
        return grad_x, grad_scale, grad_zero, None, None


def fake_quantize_activation(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    *,
    bits: int,
    kind: str,
    gradient_scale: float = 1.0,
) -> Tensor:
    """Quantise, then dequantise `x`, differentiable; see `bitdial.functional.fake_quantize_activation`."""
    if use_triton(x) and scale.dtype == torch.float32 and kind != bf.DYNAMIC:
        bf.check_activation(bits, kind, zero_point)
        codes = ActivationCodes.of(scale, bits=bits, kind=kind, gradient_scale=gradient_scale)
        whole = None if zero_point is None else bf.integer_zero_point(zero_point.detach(), bits)
        return bf.apply(_Activation, x, scale, zero_point, whole, codes)
    with torch.autocast(x.device.type, enabled=False):
        return bf.fake_quantize_activation(
            x.to(scale.dtype), scale, zero_point, bits=bits, kind=kind, gradient_scale=gradient_scale
        )


def quantize_activation_by(x: Tensor, codes: ActivationCodes) -> Tensor:
    """Quantise, then dequantise `x` by `codes`, differentiable; only where `use_triton`."""
    return bf.apply(_Activation, x, codes.scale, None, None, codes)


class _Weight(torch.autograd.Function):
    """`bitdial.functional`'s weight quantizer by Triton kernels."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, scale: Tensor, codes: WeightCodes) -> Tensor:
        from bitdial.kernels.triton.training import quantize as triton_quantize

        weight = dense(weight)
        ctx.save_for_backward(weight, scale)
        ctx.codes = codes
        return triton_quantize.weight_forward(weight, codes, value_type(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from bitdial.kernels.triton.training import quantize as triton_quantize

        weight, _ = ctx.saved_tensors  # looks whether they have changed since
        return *triton_quantize.weight_backward(like(grads[0], weight), weight, ctx.codes), None


class _GroupedWeight(torch.autograd.Function):
    """The same where groups of inputs have scales (rows, groups), which are used as `group_scales` says."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, scale: Tensor, codes: WeightCodes, group_scales: str) -> Tensor:
        from bitdial.kernels.triton.training import groups as triton_groups

        weight = weight.contiguous()
        ctx.save_for_backward(weight, scale)
        ctx.codes, ctx.group_scales = codes, group_scales
        return triton_groups.group_forward(weight, codes, ctx.group_scales, value_type(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from bitdial.kernels.triton.training import groups as triton_groups

        weight, _ = ctx.saved_tensors  # looks whether they have changed since
        found = triton_groups.group_backward(grads[0].contiguous(), weight, ctx.codes, ctx.group_scales)
        return *found, None, None


def fake_quantize(
    weight: Tensor,
    scale: Tensor,
    *,
    high: int,
    low: int,
    scheme: str = "double_rounding",
    ties: str = "even",
    gradient_scale: float = 1.0,
    group_scales: str = "float",
) -> Tensor:
    """Quantise, then dequantise `weight`, differentiable; see `bitdial.functional.fake_quantize`.

    A scale (rows, groups) is used as it is with `group_scales` 'float', else as the nearest one of two levels; see
    `bitdial.nn.quantizers`.
    """
    settings: dict[str, Any] = {"high": high, "low": low, "scheme": scheme, "ties": ties}
    if use_triton(weight) and weight.dtype == torch.float32 and not bf.scheme_of(scheme).derives_scale:
        bf.check_fake_quantize(**settings)
        codes = WeightCodes.of(scale, **settings, gradient_scale=gradient_scale)
        if not bf.has_groups(tuple(scale.shape)):
            return quantize_weight_by(weight, codes)
        return bf.apply(_GroupedWeight, weight, scale, codes, group_scales)
    if bf.has_groups(tuple(scale.shape)) and group_scales != "float":
        scale = bf.two_level(scale, half=group_scales == "half")
    return bf.fake_quantize(weight, scale, **settings, gradient_scale=gradient_scale)


def quantize_weight_by(weight: Tensor, codes: WeightCodes) -> Tensor:
    """Quantise, then dequantise `weight` by `codes`, differentiable; only where `use_triton`, in float32."""
    return bf.apply(_Weight, weight, codes.scale, codes)


def dense(x: Tensor) -> Tensor:
    """`x` itself if its elements fill its memory without gaps or overlaps, in whatever order; else a copy."""
    if x.is_contiguous() or (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)):
        return x
    return x.contiguous()


def like(grad: Tensor, x: Tensor) -> Tensor:
    """`grad` in the memory layout of `x`."""
    return grad if grad.stride() == x.stride() else torch.empty_like(x, dtype=grad.dtype).copy_(grad)
