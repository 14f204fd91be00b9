"""Tiles of integer convolutions: chosen by an estimate, which is counted by hand here."""

import pytest

from bitdial.kernels.conv_shape import ConvShape
from bitdial.kernels.triton.inference import tiles as integer_tiles
from bitdial.kernels.triton.inference.tiles import default_tiles


def geometry(channels: int, size: int, outputs: int, taps: int = 1, groups: int = 1) -> ConvShape:
    moves = ((1, 1), (taps // 2, taps // 2), (1, 1))
    shape = ConvShape.of((channels, size, size), (outputs, taps, taps), *moves, groups)
    assert (shape.out_height, shape.out_width) == (size, size)
    return shape


def test_the_estimate_of_one_round() -> None:
    # 98 * 4 programs of 9 * 2 steps are 3 for each processor, which fit at a time; codes are dear
    work = 18 * (64 * 1.7 + 64) * 128 / 66 + 64 * 64 * 0.32
    expected = 3 * work + (1 - 0.92) * (5000 + 18 * 75 + work)
    assert integer_tiles._clocks(geometry(256, 14, 256, 3), 32 * 14 * 14, 64, 64, 128) == pytest.approx(expected)


def test_the_estimate_of_several_rounds_of_large_tiles() -> None:
    # 512 programs are 4 for each processor, which holds two at a time; products of 128 * 128 * 128 take 512 clocks
    work = 32 * 512 + 128 * 128 * 0.32
    expected = 4 * work + (1 - 0.92) * 2 * (5000 + 32 * 75 + work)
    assert integer_tiles._clocks(geometry(4096, 1, 4096), 2048, 128, 128, 128) == pytest.approx(expected)


@pytest.mark.parametrize(
    "channels, size, outputs, taps, best",
    [
        (256, 56, 64, 1, (64, 64)),
        (512, 28, 128, 1, (128, 64)),
        (256, 14, 1024, 1, (64, 128)),
        (1024, 14, 256, 1, (64, 64)),
        (512, 7, 2048, 1, (128, 128)),
        (2048, 7, 512, 1, (64, 64)),
        (64, 56, 64, 3, (128, 64)),
        (128, 28, 128, 3, (64, 128)),
        (256, 14, 256, 3, (64, 64)),
        (512, 7, 512, 3, (64, 128)),
    ],
)
def test_the_choice_is_what_was_quickest(
    channels: int, size: int, outputs: int, taps: int, best: tuple[int, int]
) -> None:
    """Layers of ResNet50 at batch 32, of which the four kinds of tiles were measured, or 256 channels at once."""
    tiles = default_tiles(geometry(channels, size, outputs, taps), 32 * size * size)
    assert (tiles.pixels, tiles.outputs) == best


@pytest.mark.parametrize("images, inputs", [(32, 256), (1, 128)])
def test_256_channels_are_one_step_where_there_is_enough_to_share(images: int, inputs: int) -> None:
    assert default_tiles(geometry(256, 14, 1024), images * 14 * 14).inputs == inputs
    assert default_tiles(geometry(256, 14, 256, 3), images * 14 * 14).inputs == 128  # over the edge
    assert default_tiles(geometry(250, 14, 1024), images * 14 * 14).inputs == 128  # not all of them channels
    assert default_tiles(geometry(256, 14, 1024), images * 14 * 14, doubled=True).inputs == 128


@pytest.mark.parametrize("channels, taps, stages", [(64, 1, 2), (256, 1, 3), (512, 1, 3), (64, 3, 4), (256, 3, 4)])
def test_a_heavy_epilogue_has_more_stages_the_more_steps(channels: int, taps: int, stages: int) -> None:
    assert default_tiles(geometry(channels, 14, 256, taps), 32 * 14 * 14, heavy_epilogue=True).stages == stages


def test_a_heavy_epilogue_has_small_tiles() -> None:
    plain, heavy = (default_tiles(geometry(512, 7, 2048), 32 * 49, heavy_epilogue=heavy) for heavy in (False, True))
    assert (plain.pixels, plain.outputs) == (128, 128)
    assert (heavy.pixels, heavy.outputs) == (64, 64)


@pytest.mark.parametrize("channels, size, outputs, stages", [(512, 7, 512, 4), (128, 28, 128, 3), (256, 14, 256, 4)])
def test_stages_are_more_where_memory_is_left(channels: int, size: int, outputs: int, stages: int) -> None:
    assert default_tiles(geometry(channels, size, outputs, 3), 32 * size * size).stages == stages


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
