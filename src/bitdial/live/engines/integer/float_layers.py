"""Unquantised layers and global average pools by integer sums in fixed point; weights lie ready for the kernel."""

from typing import Any

import torch
from torch import Tensor, nn

from bitdial.functional.fixed_point import fixed_point_powers
from bitdial.kernels.epilogue import Epilogue, Outputs
from bitdial.kernels.fixed_point import run_fixed_point_conv2d, run_mean, run_sample_scales
from bitdial.kernels.operands import FixedPointOperands
from bitdial.live.engines.exact import (
    ExactLayer,
    ExactPool,
    float_forward,
    float_layer_bits,
    plain_layer,
    pool_bits,
)
from bitdial.live.engines.integer.shapes import SHAPES, padding_of, run_as_images
from bitdial.live.plain import take_over
from bitdial.nn.layer_kinds import LayerKind

ROUNDED_AT_ONCE = 1 << 17


class FixedPointLayer(nn.Module):
    """An unquantised layer by the fixed-point operator, in the place of the exact one, whose parameters it has.

    Buffers, none in the state: `integers` (K, R, S, C), whole numbers of at most 24 bits, which float32 has exactly;
    `weight_power` (1,), float64.
    """

    weight: Tensor
    bias: Tensor | None
    kind: LayerKind
    integers: Tensor
    weight_power: Tensor

    def __init__(self, layer: ExactLayer, name: str):
        super().__init__()
        take_over(self, layer)
        self.shapes = SHAPES[layer.kind.name](layer, name)
        filters = self.shapes.filters(self.kind.to_rows(self, self.weight.detach()))
        integers = torch.empty(filters.shape, device=filters.device)
        self.register_buffer("integers", integers, persistent=False)
        self.register_buffer("weight_power", filters.new_empty(1, dtype=torch.float64), persistent=False)
        self.refresh()
        self.register_load_state_dict_post_hook(_refresh)

    def refresh(self) -> None:
        """Make the operands anew, in place; a few rows at a time, for they are made in float64."""
        rows = self.kind.to_rows(self, self.weight.detach())
        filters, size = self.shapes.filters(rows), max(1, ROUNDED_AT_ONCE // rows[0].numel())
        inverse, power = fixed_point_powers(_largest(rows), float_layer_bits(self), by_sample=False)
        for some, target in zip(filters.split(size), self.integers.split(size), strict=True):
            target.copy_((some.double() * inverse.reshape(())).round_())
        self.weight_power.copy_(power.reshape(1))

    def run(self, x: Tensor, end: Epilogue) -> Outputs:
        """Value and codes behind the layer and `end`, for the float32 x; each sample of a batch has its own power."""
        self.shapes.check(x)
        scales = run_sample_scales(x if self.kind.is_batch(x) else x[None], float_layer_bits(self))
        count = self.shapes.as_images(x).shape[0]
        scales = scales[:, :, None].expand(2, -1, count // max(scales.shape[1], 1)).reshape(2, count)
        operands = FixedPointOperands(self.integers, scales, self.weight_power, self.bias)
        shape = self.shapes.conv_shape(x)
        return run_as_images(
            self.shapes, x, end, lambda images, last: run_fixed_point_conv2d(images, operands, shape, last)
        )

    def forward(self, input: Tensor) -> Tensor:
        """The product of the rounded input and weight, exactly."""
        return self.run(input, Epilogue())[0] if input.dtype == torch.float32 else float_forward(self, input)

    def plain(self) -> nn.Module:
        """The float layer."""
        return plain_layer(self)


class FixedPointPool(nn.Module):
    """A global average pool by the fixed-point operators, in the place of the exact one."""

    def __init__(self, exact: ExactPool):
        super().__init__()
        self.exact = exact

    def forward(self, input: Tensor) -> Tensor:
        """The rounded quotient of an exact sum."""
        if input.dim() != 4 or input.dtype != torch.float32:
            return self.exact(input)
        return run_mean(input, pool_bits(input))

    def plain(self) -> nn.Module:
        """The pool."""
        return self.exact.plain()


def _largest(weight: Tensor) -> Tensor:
    """The number (1,) of largest magnitude, NaN if there is one: the one that says how a weight is rounded."""
    low, high = weight.aminmax()
    return torch.maximum(-low, high).reshape(1)


def _refresh(layer: Any, keys: object) -> None:
    """After another weight was loaded, what is made of it must follow."""
    layer.refresh()


def serves_float(layer: ExactLayer) -> bool:
    """Whether the operator can run `layer`: float32, one group, no dilation, zeros around the image."""
    if layer.weight.dtype != torch.float32 or layer.kind.name not in SHAPES:
        return False
    given: Any = layer
    if layer.kind.image_dims == 0:
        return True
    return given.groups == 1 and given.dilation == (1, 1) and padding_of(given) is not None
