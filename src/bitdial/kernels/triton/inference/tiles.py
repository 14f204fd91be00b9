"""How the kernel of a convolution on integer codes cuts its work; no Triton.

The tiles are chosen by an estimate of what they take on an H200, in clocks: bringing in the operands, multiplying them,
the epilogue of each sum, and waiting. Its numbers are those that best explain what `python benchmarks/conv.py --sweep`
measured of ResNet50's layers at batch 32, in three stages: for all but two it chooses the best of four kinds of tiles,
for these one that takes 1 % longer. More stages were tried with the tiles that it chooses. Layers of one step, of 256
channels too where there are enough pixels, and layers with a heavy epilogue have the tiles that were quickest.
"""

from bitdial.kernels.conv_shape import ConvShape
from bitdial.kernels.triton.tiles import Tiles, power_of_2

FEW_CHANNELS = 16  # below, 16 bytes hold several pixels

PROCESSORS = 132
SHARED_BYTES, REGISTERS = 227 << 10, 65536  # of each

PRODUCTS = 4096  # of int8 a clock
FEED = 66  # bytes of operands a clock; where a window may reach over the edge, codes cost 1.7 times as much
OVER_THE_EDGE = 1.7
EPILOGUE = 0.32  # clocks of each sum
BEGIN, WAIT = 5000, 75  # clocks in which a program waits: in all, and in each step
HIDDEN = 0.92  # the share of the shorter of waiting and working that the longer one hides

TILES = ((128, 64), (64, 128), (64, 64), (128, 128))  # pixels, output channels; four warps each


def run_of(shape: ConvShape) -> int:
    """How many input channels lie in one piece at a tap; for few channels a tap is a row of the filter."""
    return shape.columns * _group_channels(shape) if _taps_are_rows(shape) else _group_channels(shape)


def _group_channels(shape: ConvShape) -> int:
    return shape.channels // shape.groups


def _taps_are_rows(shape: ConvShape) -> bool:
    return _group_channels(shape) < FEW_CHANNELS and shape.groups == 1 and shape.dilation[1] == 1


def steps_of(shape: ConvShape, inputs: int) -> int:
    """How many products of `inputs` channels a filter is."""
    taps = shape.rows * (1 if _taps_are_rows(shape) else shape.columns)
    return taps * -(-run_of(shape) // inputs)


def default_tiles(shape: ConvShape, pixels: int, *, heavy_epilogue: bool = False, doubled: bool = False) -> Tiles:
    """Tiles of a convolution of so many output pixels: those that should take the fewest clocks.

    `heavy_epilogue`: a residual is added or the value kept, which takes too many registers for large tiles. `doubled`:
    weights may be 2 * w + 1, which takes too many for 256 channels at once.
    """
    inputs = power_of_2(run_of(shape), 32, 128)
    widest = power_of_2(shape.out_channels // shape.groups, 16, 128)
    steps = steps_of(shape, inputs)
    if heavy_epilogue:
        return Tiles(64, inputs, min(widest, 64), 4, 2 if steps == 1 else 3 if steps <= 4 else 4)
    if steps == 1:
        return Tiles(64, inputs, min(widest, 64), 4, 4)
    wide = Tiles(64, 256, widest, 4, 3)
    enough = _programs(shape, pixels, wide.pixels, wide.outputs) >= most_programs(wide)
    if enough and not doubled and _is_one_step_of(wide.inputs, shape):
        return wide
    choices = [tile for tile in TILES if tile[1] <= widest] or [(128, widest), (64, widest)]
    rows, outputs = min(choices, key=lambda tile: _clocks(shape, pixels, tile[0], tile[1], inputs))
    alone = _programs(shape, pixels, rows, outputs) <= PROCESSORS  # then memory for another stage costs nothing
    return Tiles(rows, inputs, outputs, 4, 4 if inputs < 128 or rows * outputs == 64 * 64 or alone else 3)


def _is_one_step_of(inputs: int, shape: ConvShape) -> bool:
    """Whether all input channels are as many, no more and no fewer, and no window reaches over the edge."""
    return run_of(shape) == inputs and steps_of(shape, inputs) == 1 and not any(shape.padding)


def most_programs(tiles: Tiles) -> int:
    """How many programs share the pixels of a layer of one step: those that the processors hold at a time."""
    return PROCESSORS * (2 if tiles.inputs > 128 else 3)


def _programs(shape: ConvShape, pixels: int, rows: int, outputs: int) -> int:
    return -(-pixels // rows) * -(-shape.out_channels // shape.groups // outputs) * shape.groups


def _clocks(shape: ConvShape, pixels: int, rows: int, outputs: int, inputs: int) -> float:
    """An estimate of how long the convolution takes in such tiles, of four warps.

    A multiprocessor has several programs at work at a time, as many as its memory and registers hold. They share its
    units, so what they do adds up; they wait side by side.
    """
    programs = -(-_programs(shape, pixels, rows, outputs) // PROCESSORS)
    stages = 4 if inputs < 128 else 3
    registers = rows * outputs // 96 + 16  # of a thread, about
    together = min(SHARED_BYTES // (stages * (rows + outputs) * inputs), REGISTERS // (128 * registers))
    edge = OVER_THE_EDGE if shape.rows * shape.columns > 1 else 1
    step = max(rows * outputs * inputs / PRODUCTS, (rows * edge + outputs) * inputs / FEED)
    steps = steps_of(shape, inputs)
    work = steps * step + rows * outputs * EPILOGUE
    working, waiting = programs * work, -(-programs // together) * (BEGIN + steps * WAIT + work)
    return max(working, waiting) + (1 - HIDDEN) * min(working, waiting)


def default_depthwise_tiles(shape: ConvShape) -> Tiles:
    """Tiles of a depthwise convolution; a guess, not yet measured on a GPU."""
    channels = power_of_2(shape.channels, 16, 64)
    return Tiles(2048 // channels, channels, channels, 4, 1)
