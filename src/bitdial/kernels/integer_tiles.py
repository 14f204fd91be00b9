"""Sizes of a convolution on integer codes, and how its kernel cuts the work; no Triton.

The tiles are chosen by counting what a tile costs a multiprocessor of an H200, in clocks: bringing in its operands,
multiplying them, and what follows each sum. `python benchmarks/conv.py --sweep` measures.
"""

from typing import NamedTuple

from torch import Tensor

FEW_CHANNELS = 16  # below, 16 bytes hold several pixels

PROCESSORS = 132
FEED = 64  # bytes a clock that one multiprocessor takes in
ALL_FEED = 5500  # and all of them together, from the second-level cache
PRODUCTS = 4096  # of int8 a clock
END = 22 / 128  # clocks that follow each sum: 22 instructions for 32 of them, four such at a time
BEGIN, BEGIN_BESIDE = 1500, 500  # clocks until a program multiplies: alone, or while another is at work
BESIDE = 128 * 128  # the most sums a program may have for two to fit


class Geometry(NamedTuple):
    """Sizes of a convolution: of the input, the output and the filter, and how the filter moves."""

    height: int
    width: int
    channels: int
    out_height: int
    out_width: int
    out_channels: int
    rows: int
    columns: int
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int

    @classmethod
    def of(
        cls,
        x: Tensor,
        weight: Tensor,
        stride: tuple[int, int],
        padding: tuple[int, int],
        dilation: tuple[int, int],
        groups: int,
    ) -> "Geometry":
        """That of x (N, C, H, W) and weight (K, R, S, C / groups)."""
        _, c, h, w = x.shape
        k, r, s, _ = weight.shape
        oh, ow = (
            (size + 2 * padding[i] - dilation[i] * (taps - 1) - 1) // stride[i] + 1
            for i, (size, taps) in enumerate(((h, r), (w, s)))
        )
        return cls(h, w, c, oh, ow, k, r, s, stride, padding, dilation, groups)

    @property
    def is_depthwise(self) -> bool:
        """Whether each channel has a filter of its own."""
        return self.groups == self.channels == self.out_channels


class Tiles(NamedTuple):
    """How a kernel cuts its work: pixels, input and output channels; warps, pipeline stages, slices of what follows."""

    pixels: int
    inputs: int
    outputs: int
    warps: int
    stages: int
    slices: int = 1


def run_of(geometry: Geometry) -> int:
    """How many input channels lie in one piece at a tap; for few channels a tap is a row of the filter."""
    return geometry.columns * _group_channels(geometry) if _taps_are_rows(geometry) else _group_channels(geometry)


def _group_channels(geometry: Geometry) -> int:
    return geometry.channels // geometry.groups


def _taps_are_rows(geometry: Geometry) -> bool:
    return _group_channels(geometry) < FEW_CHANNELS and geometry.groups == 1 and geometry.dilation[1] == 1


def default_tiles(geometry: Geometry, pixels: int) -> Tiles:
    """Tiles of a convolution of so many output pixels: those that should take the fewest clocks."""
    inputs = power_of_2(run_of(geometry), 32, 128)
    widest = power_of_2(geometry.out_channels // geometry.groups, 16, 128)
    choices = [(rows, outputs) for rows in (64, 128, 256) for outputs in (32, 64, 128) if outputs <= widest]
    choices = choices or [(128, widest)]
    rows, outputs = min(choices, key=lambda choice: _clocks(geometry, pixels, choice[0], choice[1], inputs))
    warps = 8 if rows * outputs > 8192 else 4
    return Tiles(rows, inputs, outputs, warps, 4 if inputs < 128 else 3, min(4, max(1, outputs // 32)))


def _clocks(geometry: Geometry, pixels: int, rows: int, outputs: int, inputs: int) -> float:
    """An estimate of how long the convolution takes in such tiles."""
    across = -(-geometry.out_channels // geometry.groups // outputs)
    programs = -(-pixels // rows) * across * geometry.groups
    taps = geometry.rows * (1 if _taps_are_rows(geometry) else geometry.columns)
    steps = taps * -(-run_of(geometry) // inputs)
    feed = min(FEED, ALL_FEED / min(programs, PROCESSORS))
    step = max(rows * outputs * inputs / PRODUCTS, (rows + outputs) * inputs / feed)
    begin = BEGIN if rows * outputs > BESIDE else BEGIN_BESIDE
    return -(-programs // PROCESSORS) * (begin + steps * step + rows * outputs * END)


def default_depthwise_tiles(geometry: Geometry) -> Tiles:
    """Tiles of a depthwise convolution; a guess, not yet measured on a GPU."""
    channels = power_of_2(geometry.channels, 16, 64)
    return Tiles(2048 // channels, channels, channels, 4, 1)


def power_of_2(value: int, least: int, most: int) -> int:
    """The power of 2 at or above `value`, within bounds."""
    return min(max(1 << (value - 1).bit_length(), least), most)
