"""Exported files whose activations have a scale for each token: onnxruntime computes our scales and codes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

from bitdial import BitPlan, QuantConfig, export_onnx, load, prepare, save, set_bits
from bitdial import functional as bf
from bitdial.live.layers import LiveLayer

from .conftest import FLOAT_ERROR, run_file, session

WIDTHS = (8, 6, 4, 3, 2)


class Net(nn.Module):
    """`twice` runs two times; `head` has no bias."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up = nn.Linear(32, 48)
        self.twice = nn.Linear(48, 48)
        self.head = nn.Linear(48, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.up(self.norm(x)))
        return self.head(self.twice(torch.relu(self.twice(x))))


def live_model(folder: Path, **config: Any) -> nn.Module:
    torch.manual_seed(0)
    settings = {"bit_choices": WIDTHS, "activations": "dynamic", "keep_first_last": False, **config}
    net = Net()
    save(prepare(net, QuantConfig(**settings), torch.randn(16, 32)), folder / "m")
    return load(folder / "m", net)


def inputs() -> Tensor:
    x = torch.randn(3, 4, 32, generator=torch.Generator().manual_seed(1))
    x[1, 2] = 0
    return x * torch.logspace(-3, 3, 4)[:, None]


def run_with_codes(path: Path, x: Tensor) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    model = onnx.load(path)
    names = [out for node in model.graph.node for out in node.output if ".input_codes" in out]
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    live = session(model)
    found = live.run(None, {live.get_inputs()[0].name: x.numpy()})
    return found[0], dict(zip(names, found[1:], strict=True))


CASES: list[tuple[dict[str, Any], Any]] = [
    ({}, BitPlan({"up": (2, 8)}, default=(4, 6))),
    ({"scheme": "nested", "group_size": 16}, 8),
]


@pytest.mark.parametrize(("config", "setting"), CASES, ids=str)
def test_codes_are_ours(tmp_path: Path, config: dict[str, Any], setting: Any) -> None:
    live, x = live_model(tmp_path, **config), inputs()
    seen: dict[str, list[Tensor]] = {}
    for name, layer in live.named_modules():
        if isinstance(layer, LiveLayer):
            layer.register_forward_pre_hook(
                lambda m, args, name=name: seen.setdefault(name, []).append(  # type: ignore[misc]
                    bf.quantize_activation(
                        args[0], m.codes.act_parameters(m.act_bits)[0], bits=m.act_bits, kind="dynamic"
                    )
                )
            )
    axes = {"x": {1: "tokens"}}
    done = export_onnx(live, tmp_path / "m.onnx", x[:2, :3].contiguous(), bits=setting, dynamic_axes=axes)
    set_bits(live, setting)
    seen.clear()  # of the sample
    with torch.no_grad():
        expected = live(x)
    out, codes = run_with_codes(done.path, x)
    assert set(codes) == {"up.input_codes", "twice.input_codes", "twice.input_codes_2", "head.input_codes"}
    others = 0
    for name, calls in seen.items():
        for number, ours in enumerate(calls):
            different = np.abs(ours.numpy().astype(int) - codes[f"{name}.input_codes" + ("_2" if number else "")])
            assert different.max() <= 1, name
            others += int(different.sum())
    assert others <= 2, "a float sum may move a value over the border between two codes"
    error = float((torch.from_numpy(out) - expected).abs().amax() / expected.abs().amax())
    assert error < (0.02 if others else 5 * FLOAT_ERROR)
    facts = {p.key: p.value for p in onnx.load(done.path).metadata_props}
    if setting != 8:
        assert json.loads(facts["bitdial.plan"])["layers"]["up"] == [2, 8]


def test_scale_and_codes_of_the_graph_are_bit_for_bit_ours(tmp_path: Path) -> None:
    """A layer right at the input: no float sum in front of it."""
    net = nn.Sequential(nn.Linear(32, 8))
    for bits in (8, 3):
        config = QuantConfig(bit_choices=WIDTHS, activations="dynamic", keep_first_last=False, start="mse")
        save(prepare(net, config, inputs()), tmp_path / "m")
        live = load(tmp_path / "m", net)
        x = torch.randn(500, 32, generator=torch.Generator().manual_seed(bits)) * torch.logspace(-30, 30, 500)[:, None]
        x[7] = 0
        x[8] = 1e-42
        done = export_onnx(live, tmp_path / "m.onnx", x[:4], bits=bits)
        _, codes = run_with_codes(done.path, x)
        layer: Any = live.get_submodule("0")
        ours = bf.quantize_activation(x, layer.codes.act_parameters(bits)[0], bits=bits, kind="dynamic")
        assert np.array_equal(codes["0.input_codes"], ours.numpy().astype(np.float32))
        assert np.isfinite(run_file(done.path, x)).all()
        for bad in (np.nan, np.inf):
            spoiled = x[300:304].clone()
            spoiled[1, 5] = bad
            out = run_file(done.path, spoiled)
            assert np.isnan(out[1]).all()
            assert np.isfinite(out[[0, 2, 3]]).all()
