"""Convolution and batch norm for training on a GPU, each with the quantizer beside it, as differentiable functions.

`convolve` quantises the weight, convolves and takes the moments that a batch norm needs; its backward pass ends with
the gradients of the float weight and of its scale. `normalize` does batch norm, residual addition, ReLU and the next
layer's activation quantizer in one pass. Both give the codes of the reference for the same quantizer inputs.
"""

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from bitdial.kernels.conv_shape import ConvShape
from bitdial.kernels.dispatch import INDEXABLE, use_triton
from bitdial.kernels.fake_quantize import value_type
from bitdial.kernels.width_table import ActivationCodes, WeightCodes

MOST_CHANNELS = 64  # above, cuDNN's convolutions are good
FEW_CHANNELS, MANY_PIXELS = 32, 2**16  # so they are above these two, if the filter is larger than a pixel
CONVOLUTION_TYPES = (torch.bfloat16, torch.float16)


class SideStream:
    """A stream beside that of the pass, for work that nothing there waits for soon.

    It quantises weights ahead of their convolutions, and computes weight gradients while the backward pass goes on.
    Kernels of small networks leave room for that.
    """

    AHEAD = 4  # gradients whose inputs are kept for this stream; then the pass waits, so that memory stays bounded

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.running: deque[tuple[torch.cuda.Event, tuple[Tensor, ...]]] = deque()
        self.found: list[tuple[Tensor, Tensor]] = []
        self.apart = False  # whether it has work that the stream of the pass has not waited for

    def quantize(self, weight: Tensor, codes: WeightCodes) -> tuple[Tensor, torch.cuda.Event]:
        """Quantise `weight`; the event says when that is done."""
        self.stream.wait_stream(torch.cuda.current_stream())
        self.apart = True
        with torch.cuda.stream(self.stream):
            return _quantize(weight.detach(), codes, value_type(weight)), self.stream.record_event()

    def start(
        self,
        parameters: tuple[Tensor, ...],
        gradients: Callable[[], tuple[Tensor, ...]],
        inputs: tuple[Tensor, ...],
    ) -> None:
        """Compute `gradients()`, which reads `inputs`, for `parameters`."""
        passing = torch.cuda.current_stream()
        self.stream.wait_stream(passing)
        self.apart = True
        with torch.cuda.stream(self.stream):
            self.found += zip(parameters, gradients(), strict=True)
        self.running.append((self.stream.record_event(), inputs))
        if len(self.running) > self.AHEAD:
            passing.wait_event(self.running.popleft()[0])

    def join(self) -> None:
        """Wait for all gradients (on the GPU only) and add them to those of the parameters, as autograd would have.

        A stream that got no work is left alone: in a recording, to wait for one that has no part in it is an error.
        """
        if self.apart:
            torch.cuda.current_stream().wait_stream(self.stream)
        self.apart = False
        for parameter, gradient in self.found:
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        self.running.clear()
        self.found.clear()


class Moments(NamedTuple):
    """Mean and sum of squared deviations (2, channels, tiles) over tiles of `rows` pixels."""

    parts: Tensor
    rows: int


def can_convolve(conv: nn.Conv2d, x: Tensor) -> bool:
    """Whether `convolve` serves this convolution of x: depthwise or of few channels, 16-bit, nothing unusual."""
    crowded = not is_depthwise(conv) and min(conv.in_channels, conv.out_channels) > FEW_CHANNELS
    large = x.numel() > MANY_PIXELS * conv.in_channels and conv.kernel_size != (1, 1)
    return use_triton(x) and x.numel() < INDEXABLE and not (crowded and large) and fits(conv)


def fits(conv: nn.Conv2d) -> bool:
    """Whether `convolve` serves this convolution of any input that is not too large, and of a type it knows."""
    (rows, columns), (stride, other_stride), padding = conv.kernel_size, conv.stride, conv.padding
    return (
        value_type(conv.weight) in CONVOLUTION_TYPES
        and use_triton(conv.weight)
        and conv.weight.dtype == torch.float32
        and conv.weight.is_contiguous(memory_format=torch.channels_last)
        and (is_depthwise(conv) or (conv.groups == 1 and max(conv.in_channels, conv.out_channels) <= MOST_CHANNELS))
        and conv.dilation == (1, 1)
        and conv.padding_mode == "zeros"
        and conv.bias is None
        and rows == columns
        and stride == other_stride
        and isinstance(padding, tuple)
        and padding[0] == padding[1] < rows
    )


def is_depthwise(conv: nn.Conv2d) -> bool:
    """Whether each channel has a filter of its own."""
    return conv.groups == conv.in_channels == conv.out_channels > 1


def _quantize(weight: Tensor, codes: WeightCodes, dtype: torch.dtype) -> Tensor:
    from bitdial.kernels.triton.training import quantize as triton_quantize

    return triton_quantize.weight_forward(weight, codes, dtype)


class _ConvSettings(NamedTuple):
    """How `_Convolution` runs: what quantises the weight, the weight if it is quantised already, sizes, the stream."""

    codes: WeightCodes | None
    quantized: Tensor | None
    shape: ConvShape
    depthwise: bool
    side: SideStream | None


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, scale: Tensor | None, settings: _ConvSettings
    ) -> tuple[Tensor, Tensor]:
        from bitdial.kernels.triton.training import conv as triton_conv
        from bitdial.kernels.triton.training import depthwise as triton_depthwise

        x = x.to(value_type(x), memory_format=torch.channels_last)
        quantized = settings.quantized
        if settings.codes is None:
            quantized = weight.to(x.dtype)
        elif quantized is None:
            quantized = _quantize(weight, settings.codes, x.dtype)
        kernels = triton_depthwise if settings.depthwise else triton_conv
        y, parts = kernels.convolve(x, quantized, settings.shape)
        ctx.save_for_backward(x, weight, scale, quantized)
        ctx.settings = settings._replace(quantized=None)
        ctx.mark_non_differentiable(parts)
        ctx.set_materialize_grads(False)
        return y, parts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from bitdial.kernels.triton.training import conv as triton_conv
        from bitdial.kernels.triton.training import depthwise as triton_depthwise
        from bitdial.kernels.triton.training import quantize as triton_quantize

        x, weight, scale, quantized = ctx.saved_tensors
        codes, _, shape, depthwise, side = ctx.settings
        grad = grads[0].contiguous(memory_format=torch.channels_last)
        parameters = (weight,) if scale is None else (weight, scale)

        def weight_gradients() -> tuple[Tensor, ...]:
            parts = (triton_depthwise if depthwise else triton_conv).weight_gradient(x, grad, shape)
            if codes is None:
                return (parts.sum(dim=0).permute(0, 3, 1, 2),)
            return triton_quantize.weight_backward(parts, weight, codes)

        dw: Tensor | None = None
        dscale: tuple[Tensor | None, ...] = (None,)
        if side is not None and all(p.is_leaf and p.requires_grad for p in parameters):
            side.start(parameters, weight_gradients, (x, grad, quantized))
        elif any(ctx.needs_input_grad[1:3]):  # also where the weight is frozen and its scale learns
            dw, *rest = weight_gradients()
            dscale = tuple(rest) or (None,)
        dx = None
        if ctx.needs_input_grad[0] and depthwise:
            dx = triton_depthwise.input_gradient(grad, quantized, x, shape)
        elif ctx.needs_input_grad[0] and shape.stride == (1, 1):
            dx = triton_conv.input_gradient(grad, quantized, shape)
        elif ctx.needs_input_grad[0]:
            dx = torch.ops.aten.convolution_backward(
                grad, x, quantized, None, shape.stride, shape.padding, [1, 1], False, [0, 0], 1, [True, False, False]
            )[0]
        return dx, dw, *dscale, None


def convolve(
    x: Tensor,
    conv: nn.Conv2d,
    weight: Tensor,
    codes: WeightCodes | None,
    quantized: Tensor | None = None,
    side: SideStream | None = None,
) -> tuple[Tensor, Moments]:
    """The convolution of x with `weight` (quantised on the way if there are `codes`) as `conv` has it, and its moments.

    Only where `can_convolve`. `quantized` is the quantised weight, if it is there already. With `side`, the gradients
    of parameters are computed there, and there until its `join`.
    """
    from bitdial.kernels.triton.training.conv import PIXELS, tile_pixels

    (_, channels, height, width), (rows, columns) = x.shape, conv.kernel_size
    stride, padding = conv.stride[0], conv.padding[0]
    assert isinstance(padding, int)
    image, filters = (channels, height, width), (conv.out_channels, rows, columns)
    shape = ConvShape.of(image, filters, (stride, stride), (padding, padding), groups=conv.groups)
    depthwise = is_depthwise(conv)
    scale = None if codes is None else codes.scale
    y, parts = _Convolution.apply(x, weight, scale, _ConvSettings(codes, quantized, shape, depthwise, side))
    return y, Moments(parts, PIXELS if depthwise else tile_pixels(conv.in_channels, conv.out_channels))


def can_normalize(norm: nn.BatchNorm2d, x: Tensor) -> bool:
    """Whether `normalize` serves this norm: a training batch norm with statistics, over images with channels last."""
    return (
        norm.training
        and norm.affine
        and norm.track_running_stats
        and norm.momentum is not None
        and norm.weight.dtype == torch.float32
        and use_triton(x)
        and x.is_contiguous(memory_format=torch.channels_last)
        and 0 < x.numel() < INDEXABLE
        and x.numel() > x.shape[1]
    )


class NormSettings(NamedTuple):
    """A training batch norm and its epilogue, the layer behind quantising by `codes` if there is one."""

    norm: nn.BatchNorm2d
    moments: Moments | None  # of the input, if a convolution has taken them
    relu_max: float | None  # upper bound of the ReLU, None if there is none
    codes: ActivationCodes | None
    keep_value: bool  # whether the value itself is needed


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gamma: Tensor,
        beta: Tensor,
        residual: Tensor | None,
        scale: Tensor | None,
        settings: NormSettings,
    ) -> tuple[Tensor | None, Tensor | None]:
        from bitdial.kernels.triton.training import norm as triton_norm

        norm, moments, relu_max, codes, keep_value = settings
        if residual is not None:
            residual = residual.to(x.dtype, memory_format=torch.channels_last)
        if moments is None:
            moments = Moments(triton_norm.moments(x), triton_norm.default_tile_rows(x))
        mean, var, seen = norm.running_mean, norm.running_var, norm.num_batches_tracked
        assert mean is not None
        assert var is not None
        assert seen is not None
        assert norm.momentum is not None
        norm_affine = triton_norm.norm_forward(
            x, moments.parts, moments.rows, gamma, beta, (mean, var, seen), eps=norm.eps, momentum=norm.momentum
        )
        keep = keep_value or residual is not None
        value, quantized = triton_norm.apply_forward(
            x, norm_affine, residual, codes, relu_max=relu_max, keep_value=keep, dtype=value_type(x)
        )
        ctx.save_for_backward(x, value if residual is not None else None, norm_affine, scale)
        ctx.residual, ctx.relu_max, ctx.codes = residual is not None, relu_max, codes
        ctx.set_materialize_grads(False)
        return value, quantized

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        from bitdial.kernels.triton.training import norm_backward as triton_norm_backward

        x, value, norm_affine, _ = ctx.saved_tensors
        grad, grad_quantized = (None if g is None else g.to(x.dtype, memory_format=torch.channels_last) for g in grads)
        both = grad is not None and grad_quantized is not None
        dx, dresidual, dgamma, dbeta, dscale = triton_norm_backward.backward(
            grad, grad_quantized, x, value, norm_affine, ctx.codes, relu_max=ctx.relu_max,
            keep_total=ctx.residual or both,
        )  # fmt: skip
        return dx, dgamma, dbeta, dresidual if ctx.residual else None, dscale, None


def normalize(x: Tensor, residual: Tensor | None, settings: NormSettings) -> tuple[Tensor | None, Tensor | None]:
    """Batch norm of x plus `residual`, clipped to [0, relu_max] unless that is None: the value, and it quantised.

    The value is None unless it is to be kept, the quantised form unless there are `codes`. Updates the running
    statistics. Only where `can_normalize`.
    """
    norm, codes = settings.norm, settings.codes
    scale = None if codes is None else codes.scale
    value, quantized = _Norm.apply(x, norm.weight, norm.bias, residual, scale, settings)
    return value if settings.keep_value else None, quantized
