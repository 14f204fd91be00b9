"""How a kernel cuts the work of a convolution; no Triton."""

from typing import NamedTuple


class Tiles(NamedTuple):
    """Pixels, numbers of the filter at a time and output channels of a tile; warps and pipeline stages."""

    pixels: int
    inputs: int
    outputs: int
    warps: int
    stages: int


def power_of_2(value: int, least: int, most: int) -> int:
    """The power of 2 at or above `value`, within bounds."""
    return min(max(1 << (value - 1).bit_length(), least), most)
