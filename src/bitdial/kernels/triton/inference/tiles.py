"""Sizes of a convolution on integer codes, and how its kernel cuts the work; no Triton.

The tiles are chosen by an estimate of what they take on an H200, in clocks: bringing in the operands, multiplying them,
what follows each sum, and waiting. Its numbers are those that best explain what `python benchmarks/conv.py --sweep`
measured of ResNet50's layers at batch 32, in three stages: for all but two it chooses the best of four kinds of tiles,
for these one that takes 1 % longer. More stages were tried with the tiles that it chooses. Layers of one step, of 256
channels too where there are enough pixels, and layers with a heavy end have the tiles that were quickest.
"""

from typing import NamedTuple

from torch import Tensor

FEW_CHANNELS = 16  # below, 16 bytes hold several pixels

PROCESSORS = 132
SHARED_BYTES, REGISTERS = 227 << 10, 65536  # of each

PRODUCTS = 4096  # of int8 a clock
FEED = 66  # bytes of operands a clock; where a window may reach over the edge, codes cost 1.7 times as much
OVER_THE_EDGE = 1.7
END = 0.32  # clocks that follow each sum
BEGIN, WAIT = 5000, 75  # clocks in which a program waits: in all, and in each step
HIDDEN = 0.92  # the share of the shorter of waiting and working that the longer one hides

TILES = ((128, 64), (64, 128), (64, 64), (128, 128))  # pixels, output channels; four warps each


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
    """How a kernel cuts its work: pixels, input and output channels; warps and pipeline stages."""

    pixels: int
    inputs: int
    outputs: int
    warps: int
    stages: int


def run_of(geometry: Geometry) -> int:
    """How many input channels lie in one piece at a tap; for few channels a tap is a row of the filter."""
    return geometry.columns * _group_channels(geometry) if _taps_are_rows(geometry) else _group_channels(geometry)


def _group_channels(geometry: Geometry) -> int:
    return geometry.channels // geometry.groups


def _taps_are_rows(geometry: Geometry) -> bool:
    return _group_channels(geometry) < FEW_CHANNELS and geometry.groups == 1 and geometry.dilation[1] == 1


def steps_of(geometry: Geometry, inputs: int) -> int:
    """How many products of `inputs` channels a filter is."""
    taps = geometry.rows * (1 if _taps_are_rows(geometry) else geometry.columns)
    return taps * -(-run_of(geometry) // inputs)


def default_tiles(geometry: Geometry, pixels: int, *, heavy: bool = False, centred: bool = False) -> Tiles:
    """Tiles of a convolution of so many output pixels: those that should take the fewest clocks.

    `heavy`: values are added to the sums or kept, which takes too many registers for large tiles. `centred`: weights
    may be 2 * w + 1, which takes too many for 256 channels at once.
    """
    inputs = power_of_2(run_of(geometry), 32, 128)
    widest = power_of_2(geometry.out_channels // geometry.groups, 16, 128)
    steps = steps_of(geometry, inputs)
    if heavy:
        return Tiles(64, inputs, min(widest, 64), 4, 2 if steps == 1 else 3 if steps <= 4 else 4)
    if steps == 1:
        return Tiles(64, inputs, min(widest, 64), 4, 4)
    wide = Tiles(64, 256, widest, 4, 3)
    enough = _programs(geometry, pixels, wide.pixels, wide.outputs) >= most_programs(wide)
    if enough and not centred and _is_one_step_of(wide.inputs, geometry):
        return wide
    choices = [tile for tile in TILES if tile[1] <= widest] or [(128, widest), (64, widest)]
    rows, outputs = min(choices, key=lambda tile: _clocks(geometry, pixels, tile[0], tile[1], inputs))
    alone = _programs(geometry, pixels, rows, outputs) <= PROCESSORS  # then memory for another stage costs nothing
    return Tiles(rows, inputs, outputs, 4, 4 if inputs < 128 or rows * outputs == 64 * 64 or alone else 3)


def _is_one_step_of(inputs: int, geometry: Geometry) -> bool:
    """Whether all input channels are as many, no more and no fewer, and no window reaches over the edge."""
    return run_of(geometry) == inputs and steps_of(geometry, inputs) == 1 and not any(geometry.padding)


def most_programs(tiles: Tiles) -> int:
    """How many programs share the pixels of a layer of one step: those that the processors hold at a time."""
    return PROCESSORS * (2 if tiles.inputs > 128 else 3)


def _programs(geometry: Geometry, pixels: int, rows: int, outputs: int) -> int:
    return -(-pixels // rows) * -(-geometry.out_channels // geometry.groups // outputs) * geometry.groups


def _clocks(geometry: Geometry, pixels: int, rows: int, outputs: int, inputs: int) -> float:
    """An estimate of how long the convolution takes in such tiles, of four warps.

    A multiprocessor has several programs at work at a time, as many as its memory and registers hold. They share its
    units, so what they do adds up; they wait side by side.
    """
    programs = -(-_programs(geometry, pixels, rows, outputs) // PROCESSORS)
    stages = 4 if inputs < 128 else 3
    registers = rows * outputs // 96 + 16  # of a thread, about
    together = min(SHARED_BYTES // (stages * (rows + outputs) * inputs), REGISTERS // (128 * registers))
    edge = OVER_THE_EDGE if geometry.rows * geometry.columns > 1 else 1
    step = max(rows * outputs * inputs / PRODUCTS, (rows * edge + outputs) * inputs / FEED)
    steps = steps_of(geometry, inputs)
    work = steps * step + rows * outputs * END
    working, waiting = programs * work, -(-programs // together) * (BEGIN + steps * WAIT + work)
    return max(working, waiting) + (1 - HIDDEN) * min(working, waiting)


def default_depthwise_tiles(geometry: Geometry) -> Tiles:
    """Tiles of a depthwise convolution; a guess, not yet measured on a GPU."""
    channels = power_of_2(geometry.channels, 16, 64)
    return Tiles(2048 // channels, channels, channels, 4, 1)


def power_of_2(value: int, least: int, most: int) -> int:
    """The power of 2 at or above `value`, within bounds."""
    return min(max(1 << (value - 1).bit_length(), least), most)
