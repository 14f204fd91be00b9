"""Tiles of integer convolutions: chosen by an estimate, which is counted by hand here."""

import pytest

from bitdial.kernels import integer_tiles
from bitdial.kernels.integer_tiles import Geometry, default_tiles


def geometry(channels: int, size: int, outputs: int, taps: int = 1, groups: int = 1) -> Geometry:
    moves = ((1, 1), (taps // 2, taps // 2), (1, 1))
    return Geometry(size, size, channels, size, size, outputs, taps, taps, *moves, groups)


def test_the_estimate_of_one_round() -> None:
    # 49 * 2 programs of 9 * 2 steps; each takes in (128 + 128) * 128 bytes, at the share of 98 programs, 5500 / 98
    expected = 500 + 18 * 256 * 128 / (5500 / 98) + 128 * 128 * 22 / 128
    assert integer_tiles._clocks(geometry(256, 14, 256, 3), 32 * 14 * 14, 128, 128, 128) == pytest.approx(expected)


def test_the_estimate_of_several_rounds_of_large_tiles() -> None:
    # 256 programs are two rounds; products of 256 * 128 * 128 take 1024 clocks, the operands 384 * 128 / (5500 / 132)
    expected = 2 * (1500 + 32 * max(1024, 384 * 128 / (5500 / 132)) + 256 * 128 * 22 / 128)
    assert integer_tiles._clocks(geometry(4096, 1, 4096), 2048, 256, 128, 128) == pytest.approx(expected)


@pytest.mark.parametrize("channels, size, outputs, taps", [(256, 14, 1024, 1), (512, 7, 512, 3), (64, 56, 64, 3)])
def test_one_image_is_spread_over_the_processors(channels: int, size: int, outputs: int, taps: int) -> None:
    one, many = (default_tiles(geometry(channels, size, outputs, taps), n * size * size) for n in (1, 256))
    assert one.pixels * one.outputs < many.pixels * many.outputs


@pytest.mark.parametrize("outputs, groups", [(1, 1), (7, 1), (24, 1), (32, 8), (4096, 1)])
@pytest.mark.parametrize("channels", [3, 16, 40, 4096])
def test_tiles_fit_the_layer(channels: int, outputs: int, groups: int) -> None:
    tiles = default_tiles(geometry(channels * groups, 9, outputs, 3, groups), 81)
    assert 16 <= tiles.outputs <= max(16, 2 * outputs // groups)
    assert 32 <= tiles.inputs <= 128  # the line of memory that padding is read from
    assert tiles.stages * (tiles.pixels + tiles.outputs) * tiles.inputs <= 227 << 10  # bytes of shared memory
