"""Layers as the operators see them: convolutions of images with channels last; a linear layer is one of 1x1 pixels."""

from collections.abc import Callable
from typing import Any, Protocol, cast

from torch import Tensor

from bitdial.errors import QuantizationError
from bitdial.kernels.conv_shape import ConvShape
from bitdial.kernels.epilogue import Epilogue, Outputs
from bitdial.nn.layer_kinds import CONV2D, LINEAR


class Shapes(Protocol):
    """The shapes of a layer's inputs and outputs, and the layer as a convolution."""

    name: str  # of the layer, for errors

    def output_shape(self, x: Tensor) -> tuple[int, ...]:
        """The shape of the layer's output for an input like x."""
        ...

    def conv_shape(self, x: Tensor) -> ConvShape:
        """The sizes of the layer as a convolution of an input like x."""
        ...

    def is_batch(self, x: Tensor) -> bool:
        """Whether channels are dimension 1 of x, and of what the layer gives."""
        ...

    def as_images(self, x: Tensor) -> Tensor:
        """Input or output x as (N, channels, H, W)."""
        ...

    def check(self, x: Tensor) -> None:
        """Raise QuantizationError naming the layer unless x has a shape that it takes."""
        ...

    def filters(self, rows: Tensor) -> Tensor:
        """A view of the weight `rows` in the order of the kernels: (K, R, S, C / groups)."""
        ...

    def rows(self, filters: Tensor) -> Tensor:
        """The way back."""
        ...


class ConvShapes:
    """The shapes of a two-dimensional convolution."""

    def __init__(self, layer: Any, name: str):
        padding = padding_of(layer)
        assert padding is not None
        self.name, self.in_channels, self.out_channels = name, layer.in_channels, layer.out_channels
        self.kernel_size = layer.kernel_size
        self.moves = layer.stride, padding, layer.dilation, layer.groups

    def output_shape(self, x: Tensor) -> tuple[int, ...]:
        """As many pixels as places of the filter."""
        shape = self.conv_shape(x)
        return *x.shape[:-3], self.out_channels, shape.out_height, shape.out_width

    def conv_shape(self, x: Tensor) -> ConvShape:
        """That of its images."""
        channels, height, width = x.shape[-3:]
        return ConvShape.of((channels, height, width), (self.out_channels, *self.kernel_size), *self.moves)

    def is_batch(self, x: Tensor) -> bool:
        """An image alone has none."""
        return x.dim() == 4

    def as_images(self, x: Tensor) -> Tensor:
        """An image alone is a batch of one."""
        return x[None] if x.dim() == 3 else x

    def check(self, x: Tensor) -> None:
        """Images of the right channels, no smaller than the filter."""
        if x.dim() not in (3, 4) or x.shape[-3] != self.in_channels:
            expected = f"({self.in_channels}, height, width) behind a batch or alone"
            raise QuantizationError(f"layer {self.name!r}: its input is {tuple(x.shape)}, expected {expected}")
        if min(self.output_shape(x)[-2:]) < 1:
            raise QuantizationError(f"layer {self.name!r}: its input {tuple(x.shape)} is smaller than its filter")

    def filters(self, rows: Tensor) -> Tensor:
        """Channels last."""
        return rows.permute(0, 2, 3, 1)

    def rows(self, filters: Tensor) -> Tensor:
        """Channels first."""
        return filters.permute(0, 3, 1, 2)


class LinearShapes:
    """The shapes of a linear layer."""

    def __init__(self, layer: Any, name: str):
        self.name, self.in_features, self.out_features = name, layer.in_features, layer.out_features

    def output_shape(self, x: Tensor) -> tuple[int, ...]:
        """The last dimension changes."""
        return *x.shape[:-1], self.out_features

    def conv_shape(self, x: Tensor) -> ConvShape:
        """Filters of one pixel on images of one."""
        return ConvShape.of((self.in_features, 1, 1), (self.out_features, 1, 1), (1, 1), (0, 0))

    def is_batch(self, x: Tensor) -> bool:
        """Rows of features."""
        return x.dim() == 2

    def as_images(self, x: Tensor) -> Tensor:
        """One pixel each."""
        return x.reshape(-1, x.shape[-1], 1, 1)

    def check(self, x: Tensor) -> None:
        """The right number of features."""
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            expected = f"(..., {self.in_features})"
            raise QuantizationError(f"layer {self.name!r}: its input is {tuple(x.shape)}, expected {expected}")

    def filters(self, rows: Tensor) -> Tensor:
        """Filters of one pixel."""
        return rows[:, None, None, :]

    def rows(self, filters: Tensor) -> Tensor:
        """The pixel of each."""
        return filters[:, 0, 0]


SHAPES: dict[str, Callable[[Any, str], Shapes]] = {CONV2D.name: ConvShapes, LINEAR.name: LinearShapes}


def run_as_images(shapes: Shapes, x: Tensor, end: Epilogue, run: Callable[[Tensor, Epilogue], Outputs]) -> Outputs:
    """What `run` gives for x as images, in the layer's own shape."""
    shapes.check(x)
    shape = shapes.output_shape(x)
    if end.residual is not None:
        end = end._replace(residual=shapes.as_images(end.residual))
    outputs = run(shapes.as_images(x), end)
    return cast(Outputs, tuple(out.reshape(shape) if out.dim() == 4 and out.shape != shape else out for out in outputs))


def padding_of(conv: Any) -> tuple[int, int] | None:
    """Rows and columns of zeros on either side, None if both sides differ or other values stand there."""
    if conv.padding_mode != "zeros":
        return None
    if conv.padding == "valid":
        return 0, 0
    if conv.padding == "same":
        both = [d * (k - 1) for d, k in zip(conv.dilation, conv.kernel_size, strict=True)]
        return None if any(total % 2 for total in both) else (both[0] // 2, both[1] // 2)
    rows, columns = cast(tuple[int, int], conv.padding)
    return rows, columns
