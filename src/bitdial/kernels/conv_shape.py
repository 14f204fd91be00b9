"""The sizes of a convolution, and how they follow from each other: for training, for integer codes, for pools."""

from typing import NamedTuple

from torch import Tensor

Pair = tuple[int, int]  # for rows and for columns


def output_size(size: int, taps: int, stride: int, padding: int, dilation: int) -> int:
    """How many windows of so many `taps` fit along an image of this size."""
    return (size + 2 * padding - dilation * (taps - 1) - 1) // stride + 1


class ConvShape(NamedTuple):
    """Sizes of one input image, of the output and of the filter, and how the filter moves. `of` computes the output's.

    A linear layer is a convolution of images of one pixel.
    """

    height: int
    width: int
    channels: int
    out_height: int
    out_width: int
    out_channels: int
    rows: int
    columns: int
    stride: Pair
    padding: Pair
    dilation: Pair
    groups: int

    @classmethod
    def of(
        cls,
        image: tuple[int, int, int],
        filters: tuple[int, int, int],
        stride: Pair,
        padding: Pair,
        dilation: Pair = (1, 1),
        groups: int = 1,
    ) -> "ConvShape":
        """That of an `image` (channels, height, width) and `filters` (output channels, rows, columns)."""
        channels, height, width = image
        outputs, rows, columns = filters
        out_height = output_size(height, rows, stride[0], padding[0], dilation[0])
        out_width = output_size(width, columns, stride[1], padding[1], dilation[1])
        return cls(
            height, width, channels, out_height, out_width, outputs, rows, columns, stride, padding, dilation, groups
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the input, the output and the filter, in the order in which kernels take them."""
        return self[:8]

    @property
    def moves(self) -> tuple[Pair, Pair, Pair, int]:
        """Stride, padding, dilation and groups, in the order in which operators take them."""
        return self[8:]

    @property
    def is_depthwise(self) -> bool:
        """Whether each channel has a filter of its own."""
        return self.groups == self.channels == self.out_channels

    def output(self, images: int) -> tuple[int, int, int, int]:
        """The shape (N, K, OH, OW) of the output of so many images."""
        return images, self.out_channels, self.out_height, self.out_width


def conv_shape(
    x: Tensor, weight: Tensor, stride: Pair, padding: Pair, dilation: Pair = (1, 1), groups: int = 1
) -> ConvShape:
    """That of images x (N, C, H, W) and a weight (K, R, S, C / groups), the order of the operators on codes."""
    (_, c, h, w), (k, r, s, _) = x.shape, weight.shape
    return ConvShape.of((c, h, w), (k, r, s), stride, padding, dilation, groups)
