"""How images become inputs, as a record and in the metadata of weights."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bitdial.errors import ConfigError
from bitdial.images import ImageSettings, settings_of_model, settings_of_weights, stored_settings


def test_settings_round_trip_through_json() -> None:
    given = ImageSettings(resize=None, crop=32, mean=(1, 2, 3), std=(4, 5, 6), order="BGR", interpolation="bilinear")
    assert ImageSettings.from_dict(json.loads(json.dumps(given.to_dict()))) == given
    assert ImageSettings.from_dict({}) == ImageSettings()
    assert str(given) == "no resizing, centre 32 x 32, BGR, mean 1 2 3, std 4 5 6"
    assert str(ImageSettings()).startswith(
        "shorter side to 256 at most (bicubic), centre 224 x 224, RGB, mean 123.675 "
    )


def test_what_cannot_be_is_refused() -> None:
    wrong = {
        "crop=0 must be": {"crop": 0},
        "crop=100000 must be": {"crop": 100000},
        "resize=2.5 must be": {"resize": 2.5},
        "resize=True must be": {"resize": True},
        "resize=100 makes images smaller than crop=224": {"resize": 100},
        "mean=(1, 2) must be three numbers": {"mean": (1, 2)},
        "std='abc' must be three numbers": {"std": "abc"},
        "std=(1.0, 0.0, 1.0) must be above 0": {"std": (1, 0, 1)},
        "mean=(1, nan, 1) must be": {"mean": (1, float("nan"), 1)},
        "order='GRB' is not known": {"order": "GRB"},
        "interpolation='cubic' is not known": {"interpolation": "cubic"},
        "unknown settings ['size']": {"size": 3},
    }
    for words, values in wrong.items():
        with pytest.raises(ConfigError) as problem:
            ImageSettings.from_dict(values)
        assert words in str(problem.value)


def test_weights_say_how_their_images_become_inputs(tmp_path: Path) -> None:
    path, tensors = tmp_path / "w.safetensors", {"a": torch.zeros(2)}
    save_file(tensors, path, {"images": json.dumps({"mean": [127.0] * 3, "std": [128.0] * 3, "order": "RGB"})})
    assert settings_of_weights(path) == ImageSettings(mean=(127, 127, 127), std=(128, 128, 128))
    save_file(tensors, path)
    assert settings_of_weights(path) is None
    save_file(tensors, path, {"images": json.dumps({"mean": 1})})
    with pytest.raises(ConfigError, match=r"w\.safetensors: what its metadata says of images is not usable: mean=1"):
        settings_of_weights(path)
    save_file(tensors, path, {"images": "{"})
    with pytest.raises(ConfigError, match=r"w\.safetensors: its metadata has images that are not JSON"):
        settings_of_weights(path)
    path.write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="is not a safetensors file"):
        settings_of_weights(path)
    with pytest.raises(ConfigError, match="cannot read"):
        settings_of_weights(tmp_path / "missing")


def test_artifacts_say_how_their_images_become_inputs() -> None:
    given = ImageSettings(crop=32)
    assert stored_settings({"image_settings": given.to_dict()}, "a.safetensors") == given
    assert stored_settings({"top1": {}}, "a.safetensors") is None
    for odd in (7, {"crop": "x"}, {"mean": [1]}, ["a"], {"nothing": 1}):
        with pytest.raises(ConfigError, match=r"^a\.safetensors: what it says of images is not usable: "):
            stored_settings({"image_settings": odd}, "a.safetensors")


def test_pixels_become_inputs() -> None:
    pixels = torch.tensor([10, 20, 30], dtype=torch.uint8).view(1, 3, 1, 1).expand(2, 3, 1, 1)
    found = ImageSettings(mean=(1, 2, 3), std=(1, 2, 4)).inputs(pixels)
    assert (found.dtype, found.flatten().tolist()) == (torch.float32, [9.0, 9.0, 6.75] * 2)
    assert pixels.flatten().tolist() == [10, 20, 30] * 2


def test_models_of_libraries_say_it_themselves() -> None:
    model = torch.nn.Linear(1, 1)
    assert settings_of_model(model) is None
    model.pretrained_cfg = {  # type: ignore[assignment]
        "mean": (0.5, 0.5, 0.5), "std": (1.0, 0.2, 1.0), "input_size": (3, 160, 160), "crop_pct": 0.95,
        "interpolation": "bilinear", "url": "",
    }  # fmt: skip
    expected = ImageSettings(resize=168, crop=160, mean=(127.5,) * 3, std=(255, 51, 255), interpolation="bilinear")
    assert settings_of_model(model) == expected
    model.pretrained_cfg = {"mean": (0, 0, 0), "std": (1, 1, 1), "input_size": (1, 28, 28)}  # type: ignore[assignment]
    assert settings_of_model(model) is None
    kind = type("Net", (torch.nn.Module,), {"__module__": "torchvision.models.net"})
    assert settings_of_model(kind()) == ImageSettings(interpolation="bilinear")
