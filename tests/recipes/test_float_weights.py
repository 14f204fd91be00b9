"""Float weights from files: the model they name, a last layer for other classes, and files that are none."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bitdial.errors import ConfigError
from bitdial.recipes.float_weights import read_float_weights


def test_the_model_of_the_file_is_built(make_weights: Callable[..., Path]) -> None:
    path = make_weights(classes=5)
    weights = read_float_weights(path)
    assert (weights.name, weights.images.mean, weights.images.order) == ("mobilenet_v2", (120.0, 110.0, 100.0), "RGB")
    assert len(weights.digest) == 64
    model, whole = weights.build(5, seed=0)
    assert whole
    assert not model.training
    for name, value in load_file(path).items():
        assert torch.equal(model.state_dict()[name], value), name


def test_other_classes_get_a_new_last_layer(
    make_weights: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    weights, state = read_float_weights(make_weights(classes=5)), torch.get_rng_state()
    with caplog.at_level(logging.WARNING):
        (first, whole), (second, _), (third, _) = (weights.build(3, seed=seed) for seed in (0, 0, 1))
    assert not whole
    assert "is for 5 classes and the folder has 3: classifier.1.weight and classifier.1.bias start anew" in caplog.text
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in weights.file.tensors.items():
        if name.startswith("classifier"):
            assert first.state_dict()[name].shape[0] == 3
            assert torch.equal(first.state_dict()[name], second.state_dict()[name])
        else:
            assert torch.equal(first.state_dict()[name], value), name
    head = [model.get_parameter("classifier.1.weight") for model in (first, third)]
    assert not torch.equal(*head), "the seed decides"


def test_files_that_do_not_fit_are_refused(make_weights: Callable[..., Path], tmp_path: Path) -> None:
    told = {"model": "mobilenet_v2", "images": '{"mean": [0, 0, 0], "std": [1, 1, 1], "order": "RGB"}'}
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "the metadata lack model and images; tools"),
        ({**told, "arguments": "{"}, "has arguments that are not JSON"),
        ({**told, "arguments": "[]"}, "has arguments that are no JSON object"),
        ({**told, "arguments": "{}", "images": "[]"}, "what its metadata says of images is not usable"),
        ({**told, "arguments": "{}"}, r"is not for mobilenet_v2: features\.\S+ is \(.*\) in the file and \("),
        ({**told, "model": "resnet18", "arguments": "{}"}, "is not for resnet18: the file has no conv1"),
        ({**told, "model": "vgg", "arguments": "{}"}, "model 'vgg' is not known"),
    ]
    for metadata, words in cases:
        path = make_weights(metadata=metadata)
        with pytest.raises(ConfigError, match=words):
            read_float_weights(path).build(8, seed=0)
    (tmp_path / "text.safetensors").write_text("no tensors")
    for name, words in (("text", r"text\.safetensors is not a safetensors file"), ("nowhere", "cannot read .*nowhere")):
        with pytest.raises(ConfigError, match=words):
            read_float_weights(tmp_path / f"{name}.safetensors")
