"""Layers as the operators see them: convolutions of images with channels last; a linear layer is one of 1x1 pixels."""

from typing import Any, cast

from torch import Tensor, nn

from bitdial.errors import QuantizationError
from bitdial.kernels.conv_shape import ConvShape
from bitdial.kernels.epilogue import Outputs


class KernelLayer(nn.Module):
    """A layer that runs by one operator together with its epilogue. Abstract."""

    called: str  # its name in the model, for errors

    def output_shape(self, x: Tensor) -> tuple[int, ...]:
        """The shape of the layer's output for an input like x."""
        raise NotImplementedError

    def conv_shape(self, x: Tensor) -> ConvShape:
        """Sizes of the layer as a convolution of an input like x."""
        raise NotImplementedError

    def is_batch(self, x: Tensor) -> bool:
        """Whether channels are dimension 1 of x, and of what the layer gives."""
        raise NotImplementedError

    def as_images(self, x: Tensor) -> Tensor:
        """Input or output x as (N, channels, H, W)."""
        raise NotImplementedError

    def run_images(self, x: Tensor, residual: Tensor | None, **epilogue: Any) -> Outputs:
        """Value and codes of the images x; see the operators."""
        raise NotImplementedError

    def run(self, x: Tensor, *, residual: Tensor | None = None, **epilogue: Any) -> Outputs:
        """Value and codes behind the layer and its epilogue, whose other fields are given by name."""
        self.check_shape(x)
        shape = self.output_shape(x)
        images = None if residual is None else self.as_images(residual)
        outputs = self.run_images(self.as_images(x), images, **epilogue)
        return cast(
            Outputs, tuple(out.reshape(shape) if out.dim() == 4 and out.shape != shape else out for out in outputs)
        )

    def check_shape(self, x: Tensor) -> None:
        """Raise QuantizationError naming this layer unless x has a shape that it takes."""
        raise NotImplementedError


class ConvShapes(KernelLayer, nn.Conv2d):
    """The shapes of a convolution. Abstract."""

    def output_shape(self, x: Tensor) -> tuple[int, ...]:
        shape = self.conv_shape(x)
        return *x.shape[:-3], self.out_channels, shape.out_height, shape.out_width

    def conv_shape(self, x: Tensor) -> ConvShape:
        padding, (channels, height, width) = padding_of(self), x.shape[-3:]
        assert padding is not None
        filters = (self.out_channels, self.kernel_size[0], self.kernel_size[1])
        stride, dilation = cast(tuple[int, int], self.stride), cast(tuple[int, int], self.dilation)
        return ConvShape.of((channels, height, width), filters, stride, padding, dilation, self.groups)

    def is_batch(self, x: Tensor) -> bool:
        return x.dim() == 4

    def as_images(self, x: Tensor) -> Tensor:
        return x[None] if x.dim() == 3 else x

    def check_shape(self, x: Tensor) -> None:
        if x.dim() not in (3, 4) or x.shape[-3] != self.in_channels:
            expected = f"({self.in_channels}, height, width) behind a batch or alone"
            raise QuantizationError(f"layer {self.called!r}: its input is {tuple(x.shape)}, expected {expected}")
        if min(self.output_shape(x)[-2:]) < 1:
            raise QuantizationError(f"layer {self.called!r}: its input {tuple(x.shape)} is smaller than its filter")


class LinearShapes(KernelLayer, nn.Linear):
    """The shapes of a linear layer. Abstract."""

    def output_shape(self, x: Tensor) -> tuple[int, ...]:
        return *x.shape[:-1], self.out_features

    def conv_shape(self, x: Tensor) -> ConvShape:
        return ConvShape.of((self.in_features, 1, 1), (self.out_features, 1, 1), (1, 1), (0, 0))

    def is_batch(self, x: Tensor) -> bool:
        return x.dim() == 2

    def as_images(self, x: Tensor) -> Tensor:
        return x.reshape(-1, x.shape[-1], 1, 1)

    def check_shape(self, x: Tensor) -> None:
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            expected = f"(..., {self.in_features})"
            raise QuantizationError(f"layer {self.called!r}: its input is {tuple(x.shape)}, expected {expected}")


def padding_of(conv: nn.Conv2d) -> tuple[int, int] | None:
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
