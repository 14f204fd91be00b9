"""Inputs and outputs of exported files: their names, and the axes whose size is free."""

import logging
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bitdial import export_onnx
from bitdial.errors import ConfigError
from bitdial.export.onnx_signature import named_outputs

from .conftest import session

X = torch.randn(4, 3, 6, generator=torch.Generator().manual_seed(0))


@dataclass
class Found:
    boxes: Tensor
    scores: Tensor | None = None


def test_names_of_outputs() -> None:
    pair = namedtuple("pair", "first second")
    for returned, names in [
        (X, ["output"]),
        ((X,), ["output"]),
        ([X, X], ["output_0", "output_1"]),
        ({"logits": X}, ["logits"]),
        ({"logits": X, "hidden": (X, {"last": X}), "loss": None}, ["logits", "hidden_0", "hidden_1_last"]),
        (Found(X), ["boxes"]),
        ((Found(X, X), X), ["output_0_boxes", "output_0_scores", "output_1"]),
        (pair(X, [X]), ["first", "second_0"]),
        ({"a": [X], "a_0": X}, ["a_0", "a_0_out"]),
    ]:
        assert list(named_outputs(returned)) == names


class Net(nn.Module):
    """Several inputs, and outputs that have the names of inputs, of each other's tensors and of values inside."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.inner, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor, scale: float = 1.0, note: object = None, **more: Tensor) -> dict[str, Any]:
        hidden = torch.relu(self.stem(x * scale + sum(more.values())))
        y = self.head(self.inner(hidden))
        return {"y": y, "x": x, "relu": y + 1, "linear": hidden, "again": y, "steps": 3, "nothing": None}


@pytest.fixture(scope="module")
def net(make_live: Callable[..., nn.Module]) -> nn.Module:
    return make_live(Net(), {"x": X, "bias": X / 3, "scale": 1.5}, activations="float")


def test_a_file_has_the_names_of_the_model(net: nn.Module, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sample = {"bias": X[:1], "scale": 1.5, "x": X[:1]}
    axes = {"x": {1: "length"}, "bias": {-2: "length"}}
    path = export_onnx(net, tmp_path / "net.onnx", sample, dynamic_axes=axes).path
    (said,) = [r.getMessage() for r in caplog.records if r.name == "bitdial.export.onnx" and r.levelno >= logging.INFO]
    assert said == f"{path}: left out, for a file gives tensors and keeps no cache: steps (int)"
    file = session(path)
    assert [(i.name, i.shape) for i in file.get_inputs()] == [
        ("x", ["batch", "length", 6]),
        ("bias", ["batch", "length", 6]),
    ]
    names = [o.name for o in file.get_outputs()]
    assert names == ["y", "x_out", "relu", "linear", "again"]
    assert file.get_outputs()[0].shape == ["batch", "length", 2]
    for batch, length in ((1, 1), (3, 5)):
        x, bias = (torch.randn(batch, length, 6, generator=torch.Generator().manual_seed(i)) for i in (1, 2))
        with torch.no_grad():
            expected = named_outputs(net(x, scale=1.5, bias=bias))
        for found, part in zip(file.run(None, {"x": x.numpy(), "bias": bias.numpy()}), expected.values(), strict=False):
            np.testing.assert_allclose(found, part.numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("sample", "options", "message"),
    [
        ({"x": X, "bias": X}, {"dynamic_axes": {"y": {1: "n"}}}, "names the input 'y'; the sample has 'x', 'bias'"),
        ({"x": X}, {"dynamic_axes": ["x"]}, r"dynamic_axes=\['x'\]: give names of axes by input, as in"),
        ({"x": X}, {"dynamic_axes": {"x": [1]}}, r"dynamic_axes\['x'\]=\[1\]: give names of axes by input"),
        ({"x": X}, {"dynamic_axes": {"x": {1: "the length"}}}, "a name is a word without spaces"),
        ({"x": X}, {"dynamic_axes": {"x": {3: "n"}}}, "'x' has 3 axes, and axis 3 is none of them"),
        ({"x": X[:, :1]}, {"dynamic_axes": {"x": {1: "n"}}}, "axis 'n', 1 of 'x', has size 1 in the sample"),
        ({"x": X, "bias": X[:1]}, {}, "'batch' has several sizes in the sample: 4 in axis 0 of 'x', 1 in axis 0 of"),
        ({"x": X}, {"dynamic_axes": {"x": {1: "n", 2: "n"}}}, "different sizes different names"),
        ({"x": X, "note": slice(3)}, {}, "input 'note' holds a slice; a file takes tensors, in tuples, lists or dicts"),
    ],
)  # fmt: skip
def test_axes_and_inputs_that_do_not_fit(
    net: nn.Module, sample: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        export_onnx(net, tmp_path / "net.onnx", sample, **options)
    assert list(tmp_path.iterdir()) == []
