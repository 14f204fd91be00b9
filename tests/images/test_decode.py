"""From files of every kind to the pixels that people see."""

import base64
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from bitdial.errors import ConfigError, MissingDependencyError
from bitdial.images import ImageSettings
from bitdial.images.decode import cut_out, decode, decode_all, open_image, picture_uri

Image = pytest.importorskip("PIL.Image")
Write = Callable[..., Path]
WHOLE = ImageSettings(resize=None, crop=8)


def pixels(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(height + width).integers(0, 256, (height, width, 3), dtype=np.uint8)


def found(path: Path, settings: ImageSettings = WHOLE) -> np.ndarray:
    """Height, width, channels."""
    tensor, _ = decode(path, settings)
    assert tensor.dtype == torch.uint8
    assert tensor.shape == (3, settings.crop, settings.crop)
    return tensor.permute(1, 2, 0).numpy()


def test_the_middle_is_cut_out_and_the_order_kept(write: Write) -> None:
    values = pixels(11, 14)
    path = write("a.png", values)
    np.testing.assert_array_equal(found(path), values[2:10, 3:11])  # 1.5 goes to the even 2, as torchvision rounds
    flipped = ImageSettings(resize=None, crop=8, order="BGR")
    np.testing.assert_array_equal(found(path, flipped), values[2:10, 3:11, ::-1])


def test_images_are_made_smaller_and_only_enlarged_to_the_crop(write: Write) -> None:
    """An image of the crop's size, or between crop and resize, keeps its pixels."""
    settings = ImageSettings(resize=12, crop=8)
    for height, width in ((8, 8), (12, 12), (10, 9), (12, 30)):
        values = pixels(height, width)
        top, left = round((height - 8) / 2), round((width - 8) / 2)
        path = write("a.png", values)
        np.testing.assert_array_equal(found(path, settings), values[top : top + 8, left : left + 8])
        assert not decode(path, settings)[1]
    large = pixels(25, 40)
    for name in ("bicubic", "nearest"):
        resized = Image.fromarray(large).resize((int(12 * 40 / 25), 12), Image.Resampling[name.upper()])
        expected = np.asarray(resized)[2:10, 6:14]  # 19 wide: 5.5 goes to the even 6
        given = ImageSettings(resize=12, crop=8, interpolation=name)
        np.testing.assert_array_equal(found(write("large.png", large), given), expected)
    small = pixels(4, 6)
    expected = np.asarray(Image.fromarray(small).resize((12, 8), Image.Resampling.BICUBIC))[:, 2:10]
    path = write("small.png", small)
    np.testing.assert_array_equal(found(path, settings), expected)
    assert decode(path, settings)[1]
    with pytest.raises(ConfigError, match=r"small\.png has 6 x 4 pixels, fewer than the crop of 8 x 8"):
        decode(path, WHOLE)


def test_every_kind_of_pixel_becomes_rgb(write: Write, tmp_path: Path) -> None:
    rgb = pixels(8, 8)
    grey = rgb[:, :, 0]
    as_rgb = np.stack([grey] * 3, axis=2)
    np.testing.assert_array_equal(found(write("grey.png", grey)), as_rgb)
    alpha = np.concatenate([rgb, grey[:, :, None]], axis=2)
    np.testing.assert_array_equal(found(write("alpha.png", alpha)), rgb)
    np.testing.assert_array_equal(found(write("grey_alpha.png", np.stack([grey, grey], axis=2))), as_rgb)
    np.testing.assert_array_equal(found(write("one.png", grey > 99)), np.where(as_rgb > 99, 255, 0))
    palette = Image.fromarray(rgb).quantize(16)
    palette.save(tmp_path / "palette.png", transparency=0)
    np.testing.assert_array_equal(found(tmp_path / "palette.png"), np.asarray(palette.convert("RGB")))
    inks = Image.fromarray(rgb).convert("CMYK")
    inks.save(tmp_path / "inks.tif")
    np.testing.assert_array_equal(found(tmp_path / "inks.tif"), np.asarray(inks.convert("RGB")))
    inks.save(tmp_path / "inks.jpg", quality=100)
    assert np.abs(found(tmp_path / "inks.jpg").astype(int) - rgb).mean() < 20  # not inverted


def test_sixteen_bits_are_scaled_and_not_cut_off(write: Write, tmp_path: Path) -> None:
    grey = pixels(8, 8)[:, :, 0]
    as_rgb = np.stack([grey] * 3, axis=2)
    deep = grey.astype(np.uint16) * 257
    np.testing.assert_array_equal(found(write("deep.png", deep)), as_rgb)
    np.testing.assert_array_equal(found(write("deep.tif", deep)), as_rgb)
    np.testing.assert_array_equal(found(write("deep.pgm", deep)), as_rgb)
    for mode in (np.int32, np.float32):
        path = write("unknown.tif", grey.astype(mode))
        with pytest.raises(ConfigError, match=r"unknown\.tif has pixels of 32 bits .* save it with 8 bits"):
            decode(path, WHOLE)


def test_an_image_lies_as_its_exif_entry_says(write: Write) -> None:
    values = pixels(8, 8)
    exif = Image.Exif()
    exif[0x0112] = 6  # show it turned by 90 degrees to the right
    np.testing.assert_array_equal(found(write("turned.png", values, exif=exif)), np.rot90(values, -1))
    damaged = write("damaged.jpg", values, exif=b"Exif\x00\x00garbage that is no note")
    assert open_image(damaged).size == (8, 8)


def test_a_part_is_cut_out_and_scaled(write: Write) -> None:
    values = pixels(11, 14)
    image = open_image(write("a.png", values))
    np.testing.assert_array_equal(cut_out(image, (3, 2, 11, 10), WHOLE).permute(1, 2, 0).numpy(), values[2:10, 3:11])
    given = ImageSettings(resize=None, crop=8, order="BGR", interpolation="bilinear")
    found = cut_out(image, (1, 0, 13, 11), given)
    expected = np.asarray(Image.fromarray(values[0:11, 1:13]).resize((8, 8), Image.Resampling.BILINEAR))
    assert (found.dtype, found.is_contiguous()) == (torch.uint8, True)
    np.testing.assert_array_equal(found.permute(1, 2, 0).numpy(), expected[:, :, ::-1])


def test_a_file_that_is_no_image_is_named(tmp_path: Path, write: Write) -> None:
    whole = write("whole.jpg", pixels(64, 64)).read_bytes()
    for name, content in {"text.jpg": b"words", "empty.png": b"", "cut.jpg": whole[: len(whole) // 2]}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=f"{name} cannot be read as an image: .*; replace it, or take it out"):
            decode(tmp_path / name, WHOLE)
    with pytest.raises(ConfigError, match=r"gone\.png cannot be read as an image"):
        decode(tmp_path / "gone.png", WHOLE)


def test_an_enormous_image_is_refused(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write("huge.png", pixels(20, 20))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(ConfigError, match=r"huge\.png cannot be read as an image"):
        decode(path, WHOLE)


def test_without_pillow_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, write: Write) -> None:
    path = write("a.png", pixels(8, 8))
    monkeypatch.setitem(__import__("sys").modules, "PIL.Image", None)
    with pytest.raises(MissingDependencyError, match=r"pillow is not installed; .*bitdial\[images\]"):
        decode(path, WHOLE)


def test_pictures_for_pages_come_back(tmp_path: Path) -> None:
    pixels = torch.zeros(3, 16, 24, dtype=torch.uint8)
    pixels[0, :, 8:] = 200
    kind, _, data = picture_uri(pixels).partition(",")
    assert kind == "data:image/jpeg;base64"
    (tmp_path / "a.jpg").write_bytes(base64.b64decode(data))
    again = torch.from_numpy(np.array(open_image(tmp_path / "a.jpg")).transpose(2, 0, 1))
    assert again.shape == pixels.shape
    assert (again.int() - pixels.int()).abs().max() < 12


def test_many_images_are_decoded_side_by_side(tmp_path: Path) -> None:
    """Each as by itself, in their order; what Python warns of stays as it was, also after an error."""
    paths = []
    for number in range(40):
        paths.append(tmp_path / f"{number}.png")
        Image.fromarray(np.full((20, 24, 3), number, dtype=np.uint8)).save(paths[-1])
    settings, before = ImageSettings(resize=None, crop=16), list(warnings.filters)
    found = decode_all(paths, settings)
    assert [int(pixels[0, 0, 0]) for pixels, _ in found] == list(range(40))
    assert all(torch.equal(pixels, decode(path, settings)[0]) for path, (pixels, _) in zip(paths, found, strict=True))
    paths[7].write_bytes(b"no image")
    paths[30].write_bytes(b"nor this")
    with pytest.raises(ConfigError, match=r"7\.png cannot be read as an image"):
        decode_all(paths, settings)
    assert warnings.filters == before
