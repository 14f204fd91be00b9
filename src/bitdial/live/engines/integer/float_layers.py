"""Layers kept in float and global average pools, by integer sums in fixed point; weights lie ready for the kernel."""

from typing import Any, cast

import torch
from torch import Tensor, nn

from bitdial.kernels.epilogue import Epilogue, Outputs
from bitdial.kernels.fixed_point import run_fixed_point_conv2d, run_mean, run_sample_scales
from bitdial.kernels.operands import FixedPointOperands
from bitdial.live.engines.exact import (
    ExactAdaptiveAvgPool2d,
    ExactConv2d,
    ExactLinear,
    fixed_point_weight,
    float_layer_bits,
    pool_bits,
)
from bitdial.live.engines.integer.shapes import ConvShapes, KernelLayer, LinearShapes, padding_of


class FixedPointLayer(KernelLayer):
    """What both share. Abstract. Buffers, none in the state: `integers` (K, R, S, C), `weight_power` (1,)."""

    integers: Tensor
    weight_power: Tensor

    def allocate(self) -> None:
        """Make the buffers, and fill them."""
        integers, power = fixed_point_weight(cast(Any, self))
        self.register_buffer("integers", self.filters(integers).contiguous(), persistent=False)
        self.register_buffer("weight_power", power.reshape(1).clone(), persistent=False)
        self.register_load_state_dict_post_hook(_refresh)

    def refresh(self) -> None:
        """Fill the buffers anew, in place."""
        integers, power = fixed_point_weight(cast(Any, self))
        self.integers.copy_(self.filters(integers))
        self.weight_power.copy_(power.reshape(1))

    def filters(self, weight: Tensor) -> Tensor:
        """`weight` in the order (K, R, S, C)."""
        raise NotImplementedError

    def run(self, x: Tensor, *, residual: Tensor | None = None, **epilogue: Any) -> Outputs:
        """As in KernelLayer, for float32; each sample, dimension 0 of a batch, has its own power."""
        self.check_shape(x)
        by_sample = x.dim() > (3 if isinstance(self, nn.Conv2d) else 1)
        scales = run_sample_scales(x if by_sample else x[None], float_layer_bits(cast(Any, self)))
        images = self.as_images(x).shape[0]
        scales = scales[:, :, None].expand(2, -1, images // max(scales.shape[1], 1)).reshape(2, images)
        return super().run(x, residual=residual, sample_scales=scales, **epilogue)

    def run_images(self, x: Tensor, residual: Tensor | None, **epilogue: Any) -> Outputs:
        scales, bias = epilogue.pop("sample_scales"), cast(Tensor | None, self.bias)
        operands = FixedPointOperands(self.integers, scales, self.weight_power, bias)
        return run_fixed_point_conv2d(x, operands, self.conv_shape(x), Epilogue(residual=residual, **epilogue))


class FixedPointConv2d(FixedPointLayer, ConvShapes, ExactConv2d):
    """A float convolution by the fixed-point operator."""

    exact_type = ExactConv2d

    def filters(self, weight: Tensor) -> Tensor:
        return weight.permute(0, 2, 3, 1)

    def forward(self, input: Tensor) -> Tensor:
        """The convolution of the rounded input and weight, exactly."""
        return self.run(input)[0] if input.dtype == torch.float32 else super().forward(input)


class FixedPointLinear(FixedPointLayer, LinearShapes, ExactLinear):
    """A float linear layer by the fixed-point operator."""

    exact_type = ExactLinear

    def filters(self, weight: Tensor) -> Tensor:
        return weight[:, None, None, :]

    def forward(self, input: Tensor) -> Tensor:
        """The product of the rounded input and weight, exactly."""
        return self.run(input)[0] if input.dtype == torch.float32 else super().forward(input)


class FixedPointPool(ExactAdaptiveAvgPool2d):
    """A global average pool by the fixed-point operators."""

    exact_type = ExactAdaptiveAvgPool2d

    def allocate(self) -> None:
        """There is nothing to make."""

    def forward(self, input: Tensor) -> Tensor:
        """The rounded quotient of an exact sum."""
        if not self.is_global or input.dim() != 4 or input.dtype != torch.float32:
            return super().forward(input)
        return run_mean(input, pool_bits(input))


def _refresh(layer: Any, keys: object) -> None:
    """After another weight was loaded, the buffers must follow; a code-exact copy has none."""
    if isinstance(layer, FixedPointLayer):
        layer.refresh()


def serves_float(layer: nn.Module) -> bool:
    """Whether the operator can run `layer`: float32, one group, no dilation, zeros around the image."""
    if not isinstance(layer, ExactConv2d | ExactLinear) or layer.weight.dtype != torch.float32:
        return False
    if isinstance(layer, ExactLinear):
        return True
    return layer.groups == 1 and layer.dilation == (1, 1) and padding_of(layer) is not None
