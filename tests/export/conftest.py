"""Live models of several kinds, and what onnxruntime makes of an exported file, codes included."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bitdial import QuantConfig, build_model, code_exact, load, onnx_session_options, prepare, save
from bitdial import functional as bf
from bitdial.export.onnx_signature import named_outputs
from bitdial.live.layers import LiveLayer
from bitdial.nn import SwitchableBatchNorm
from bitdial.prepare.model_call import call

try:
    import onnx
    import onnxruntime
    import onnxscript  # noqa: F401
except ImportError:  # the extra `onnx` is not installed
    collect_ignore = ["test_to_onnx.py"]

WIDTHS = (8, 6, 4, 3, 2)
# Float32 sums of a few thousand terms, in two orders: their difference in shares of the largest value.
FLOAT_ERROR = 2e-6


class Mixed(nn.Module):
    """A convolution into a quantizer, a grouped and a depth-wise one, a residual, linears on two and three axes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 6, 3, padding=1, bias=False)
        self.stem_norm = nn.BatchNorm2d(6)
        self.conv = nn.Conv2d(6, 8, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.grouped = nn.Conv2d(8, 8, 3, padding=1, groups=2, bias=False)
        self.depthwise = nn.Conv2d(8, 8, (3, 1), padding=(2, 0), groups=8, dilation=(2, 1))
        self.reflect = nn.Conv2d(8, 7, 3, padding=(1, 2), padding_mode="reflect", bias=False)
        self.tokens = nn.Linear(7, 5)
        self.hidden = nn.Linear(5, 9, bias=False)
        self.head = nn.Linear(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem_norm(self.stem(x)))
        x = torch.relu(self.norm(self.conv(x)))
        x = self.grouped(x) + x
        x = self.reflect(self.depthwise(x))
        x = torch.relu(self.tokens(x.flatten(2).transpose(1, 2)))
        return self.head(self.hidden(x.mean(dim=1)).abs())


def random_norms(model: nn.Module, generator: torch.Generator) -> None:
    """Give every norm set statistics and parameters of its own, as training does."""
    for norm in (m for m in model.modules() if isinstance(m, SwitchableBatchNorm)):
        for one in norm.sets.values():
            for name, value in one.state_dict(keep_vars=True).items():
                if value.is_floating_point():
                    centre = 0.0 if name in ("bias", "running_mean") else 1.0
                    value.data.copy_(centre + 0.2 * (torch.rand(value.shape, generator=generator) - 0.5))


@pytest.fixture(scope="session")
def make_live(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., nn.Module]:
    """Makes a live model of a float model (or of a name) with random weights; `config` goes to QuantConfig."""

    def make(model: nn.Module | str, calibration: Tensor, *, widths: tuple[int, ...] = WIDTHS, **config: Any):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            built = build_model(model) if isinstance(model, str) else model
            prepared = prepare(built.eval(), QuantConfig(bit_choices=widths, start="3std", **config), calibration)
        random_norms(prepared, torch.Generator().manual_seed(5))
        path = tmp_path_factory.mktemp("live") / "model.safetensors"
        save(prepared.eval(), path)
        return load(path, None if isinstance(model, str) else built)

    return make


@pytest.fixture(scope="session")
def mixed(make_live: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Makes a live Mixed."""

    def make(**config: Any) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            model = Mixed()
        return make_live(model, images(1, channels=2, count=16, size=10), **config)

    return make


def images(seed: int, *, channels: int = 3, count: int = 4, size: int = 32) -> Tensor:
    return torch.randn(count, channels, size, size, generator=torch.Generator().manual_seed(seed))


@dataclass
class Run:
    """What a session gave: the outputs, and the codes that each quantised layer was fed with, in order."""

    outputs: list[np.ndarray]
    codes: dict[str, np.ndarray]


def session(model: "Path | onnx.ModelProto", options: Any = None) -> onnxruntime.InferenceSession:
    options = onnx_session_options() if options is None else options
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    data = str(model) if isinstance(model, Path) else model.SerializeToString()
    return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])


def run_file(path: Path, x: Tensor, options: Any = None) -> np.ndarray:
    """The file's first output for `x`."""
    live = session(path, options)
    return live.run(None, {live.get_inputs()[0].name: x.numpy()})[0]


def run_with_codes(path: Path, x: Tensor | dict[str, Tensor]) -> Run:
    """Run the file with every quantizer's codes as further outputs; `x` is its input, or its inputs by name."""
    model = onnx.load(path)
    own = len(model.graph.output)
    names = [node.output[0] for node in model.graph.node if node.op_type == "QuantizeLinear"]
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    live = session(model)
    inputs = x if isinstance(x, dict) else {live.get_inputs()[0].name: x}
    found = live.run(None, {name: value.numpy() for name, value in inputs.items()})
    return Run(found[:own], dict(zip(names, found[own:], strict=True)))


def stored_codes(model: onnx.ModelProto, layer: str) -> tuple[np.ndarray, onnx.TensorProto]:
    """A layer's weight codes out of the file's bytes, and the tensor that holds them; unpacked by hand."""
    node = next(
        node
        for node in model.graph.node
        if node.op_type == "DequantizeLinear"
        and {p.key: p.value for p in node.metadata_props}.get("bitdial.part") == "weight"
        and {p.key: p.value for p in node.metadata_props}["bitdial.layer"] == layer
    )
    tensor = next(t for t in model.graph.initializer if t.name == node.input[0])
    size = {onnx.TensorProto.INT8: 8, onnx.TensorProto.INT4: 4, onnx.TensorProto.INT2: 2}[tensor.data_type]
    data = np.frombuffer(tensor.raw_data, np.uint8).astype(np.int64)
    lanes = np.stack([(data >> (size * i)) & ((1 << size) - 1) for i in range(8 // size)], axis=1).reshape(-1)
    codes = np.where(lanes >= 1 << (size - 1), lanes - (1 << size), lanes)[: int(np.prod(tensor.dims))]
    return codes.reshape(tuple(tensor.dims)), tensor


def check_against(path: Path, live: nn.Module, x: Tensor | dict[str, Tensor]) -> int:
    """Compare the file's run on `x` with `code_exact(live)`, layer by layer; how many codes fell on the other side.

    Each layer's codes must be equal, but where a value lies on the border between two codes to within the error of a
    float32 sum: there either is right, and ours goes on with the file's, so that every layer is compared on the same
    inputs. The outputs must then agree to within that error too.
    """
    run = run_with_codes(path, x)
    exact, others = code_exact(live), 0
    met: set[str] = set()
    same_input: dict[tuple[int, float, int], str] = {}
    alive: list[Tensor] = []  # so that no two inputs have had the same address

    def follow(layer: LiveLayer, arguments: tuple[Tensor]) -> tuple[Tensor]:
        nonlocal others
        values = arguments[0]
        alive.append(values)
        scale, zero_point = layer.codes.act_parameters(layer.act_bits)
        key = values.data_ptr(), float(scale), layer.act_bits
        call = same_input.setdefault(key, _unmet(f"{layer.name}.input_codes", met))  # equal quantizers become one
        met.add(call)
        ours = bf.quantize_activation(values, scale, zero_point, bits=layer.act_bits, kind=layer.codes.act_kind).int()
        theirs = torch.from_numpy(run.codes[call]).int()
        wrong = ours != theirs
        others += int(wrong.sum())
        assert int((ours - theirs).abs().max()) <= 1, layer.name
        position = (values / scale)[wrong].double()
        distance = (position - position.floor() - 0.5).abs()
        assert bool((distance <= FLOAT_ERROR * 2**layer.act_bits).all()), (layer.name, distance.max())
        return (bf.dequantize_activation(theirs, scale, zero_point, bits=layer.act_bits),)

    quantised = [m for m in exact.modules() if isinstance(m, LiveLayer) and m.quantizes_input]
    for layer in quantised:
        layer.register_forward_pre_hook(follow)
    with torch.no_grad():
        expected = next(iter(named_outputs(call(exact, x)).values())).numpy()
    assert met == set(run.codes), "every quantizer of the file was compared"
    difference = np.abs(run.outputs[0] - expected).max() / np.abs(expected).max()
    assert difference <= 5 * FLOAT_ERROR, difference
    return others


def _unmet(name: str, met: set[str]) -> str:
    """`name`, or what the exporter calls the codes when a layer runs for the second, third, ... time."""
    number = 1
    while (found := name if number == 1 else f"{name}_{number}") in met:
        number += 1
    return found
