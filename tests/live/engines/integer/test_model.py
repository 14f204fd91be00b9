"""Whole networks on the integer operators equal their code-exact evaluation, bit for bit, at every setting of the dial.

On a GPU kernels run compiled, in `test_interpreter.py` under Triton's interpreter; elsewhere the same tests see
what the CPU has.
"""

import copy
import logging
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitdial import (
    BitPlan,
    QuantConfig,
    Rule,
    add_transitions,
    build_model,
    code_exact,
    export_onnx,
    load,
    prepare,
    read_artifact,
    recalibrate_norms,
    save,
    set_bits,
)
from bitdial.dial.dial import dialled_layers
from bitdial.errors import QuantizationError, TrainingError
from bitdial.live import kernel_choice
from bitdial.live.engines.integer import IntegerModel
from bitdial.live.engines.integer.engine import IntegerEngine
from bitdial.live.engines.integer.graph import Call, LayerCall

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.interpreter
BITS = (8, 6, 4, 3, 2)


class InvertedNet(nn.Module):
    """As in MobileNetV2: 1x1, depth-wise 3x3, linear 1x1, an addition without ReLU, ReLU6."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU6())
        self.expand = nn.Sequential(nn.Conv2d(8, 20, 1, bias=False), nn.BatchNorm2d(20), nn.ReLU6(inplace=True))
        self.depthwise = nn.Sequential(
            nn.Conv2d(20, 20, 3, 1, 1, groups=20, bias=False), nn.BatchNorm2d(20), nn.ReLU6(inplace=True)
        )
        self.project = nn.Sequential(nn.Conv2d(20, 8, 1, bias=False), nn.BatchNorm2d(8))
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.project(self.depthwise(self.expand(x)))
        return self.head(self.pool(x).flatten(1))


class LinearNet(nn.Module):
    """Linear layers with a norm, a residual addition, a ReLU, and more readers than a call serves."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(7, 12), nn.BatchNorm1d(12)
        self.second = nn.Linear(12, 12, bias=False)
        self.heads = nn.ModuleList(nn.Linear(12, 3) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.first(x)))
        x = F.relu(self.second(x) + x)
        return torch.cat([head(x) for head in self.heads], dim=-1)


class OddNet(nn.Module):
    """What the kernels leave to others, among layers that they serve."""

    def __init__(self) -> None:
        super().__init__()
        self.reflect = nn.Conv2d(3, 6, 3, padding=1, padding_mode="reflect")
        self.grouped, self.norm = nn.Conv2d(6, 9, 3, padding="same", groups=3), nn.BatchNorm2d(9)
        self.even = nn.Conv2d(9, 8, 2, padding="same")
        self.twice = nn.Conv2d(8, 8, (1, 3), padding=(0, 1), dilation=1)
        self.bare_norm = nn.BatchNorm2d(8, affine=False)
        self.plain = nn.Conv2d(8, 4, 3, stride=2, padding=2, dilation=2)
        self.line = nn.Linear(4, 4)  # over the last dimension of an image
        self.bias = nn.Parameter(torch.linspace(-1, 1, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.grouped(F.relu(self.reflect(x))))
        x = F.relu(self.even(x))
        x = self.twice(self.twice(x)) + x
        y = self.plain(self.bare_norm(torch.cat([x[:, :4], x[:, 4:]], dim=1)))
        return self.line(F.relu(y + self.bias))


class InPlaceNet(nn.Module):
    """A value that changes in place while two layers read it, one before and one after."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y = self.second(x)
        x.mul_(-0.5)
        return self.third(x) + y


class BranchingNet(nn.Module):
    """Cannot be traced: what runs depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x))
        return F.relu(x) if float(x.sum()) > 1e9 else x


class ExcitedNet(nn.Module):
    """Squeeze-and-excite on a norm that comes first: sums by function, whose order depends on the memory layout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.stem = nn.BatchNorm2d(3), nn.Conv2d(3, 16, 3, padding=1)
        self.body = nn.Conv2d(16, 16, 3, padding=1)
        self.squeeze, self.excite, self.head = nn.Linear(19, 4), nn.Linear(4, 16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        y = F.relu(self.body(F.relu(self.stem(x))))
        means = torch.cat([x.mean((2, 3)), F.adaptive_avg_pool2d(y, 1).flatten(1)], dim=1)
        weights = torch.sigmoid(self.excite(F.silu(self.squeeze(means))))
        return self.head((y * weights[:, :, None, None]).mean((2, 3)))


IMAGES = torch.randn(2, 3, 9, 8, generator=torch.Generator().manual_seed(3))
NETS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "residual": (lambda: build_model("cifar_resnet", blocks=1, width=4), IMAGES),
    "inverted": (InvertedNet, IMAGES),
    "linear": (LinearNet, torch.randn(6, 7, generator=torch.Generator().manual_seed(4))),
    "odd": (OddNet, IMAGES),
    "in place": (InPlaceNet, IMAGES),
    "branching": (BranchingNet, IMAGES),
    "excited": (ExcitedNet, IMAGES),
}


def make(net: str, path: Path, **settings: Any) -> tuple[nn.Module, Tensor]:
    """A float model whose norms have seen something, and its inputs; its file, prepared so, lies at `path`."""
    build, x = NETS[net]
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = build()
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.running_mean.normal_(0, 0.1)
                module.running_var.uniform_(0.2, 2)
                if module.affine:
                    nn.init.uniform_(module.weight, 0.5, 2)
                    nn.init.normal_(module.bias)
        prepared = prepare(model, QuantConfig(bit_choices=BITS, **settings), x)
    save(prepared, path)
    return model, x.to(DEVICE)


def random_plan(model: nn.Module, rng: random.Random) -> BitPlan:
    return BitPlan({name: (rng.choice(BITS), rng.choice(BITS)) for name in dialled_layers(model)})


def equal(live: nn.Module, exact: nn.Module, x: Tensor, setting: Any) -> None:
    for model in (live, exact):
        set_bits(model, setting)
    with torch.no_grad():
        assert torch.equal(live(x), exact(x)), setting


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("scheme", ["double_rounding", "nested", "centred"])
@pytest.mark.parametrize("net", NETS)
def test_networks_equal_their_exact_evaluation(net: str, scheme: str, tmp_path: Path) -> None:
    model, x = make(net, tmp_path / "m", scheme=scheme, keep_first_last=net in ("residual", "excited"))
    live, exact = (load(tmp_path / "m", model, device=DEVICE, kernels=kind) for kind in ("integer", "float"))
    assert isinstance(live, IntegerModel)
    exact = code_exact(exact)
    rng = random.Random(0)
    for setting in (8, 4, 3, 2, (2, 8), *(random_plan(exact, rng) for _ in range(3)), 8):
        equal(live, exact, x, setting)


@pytest.mark.parametrize("activations", ["signed", "asymmetric", "float"])
@pytest.mark.parametrize("scheme", ["nested+8", "truncate", "adabits", "lsq", "dorefa"])
def test_other_schemes_and_kinds(scheme: str, activations: str, tmp_path: Path) -> None:
    rules = (Rule(type="Linear", activations="float"),)
    model, x = make("inverted", tmp_path / "m", scheme=scheme, activations=activations, rules=rules)
    live, exact = (load(tmp_path / "m", model, device=DEVICE, kernels=kind) for kind in ("integer", "float"))
    for setting in (8, 3, (2, 6)):
        equal(live, code_exact(exact), x, setting)


def test_after_any_switches_as_freshly_loaded(tmp_path: Path) -> None:
    model, x = make("inverted", tmp_path / "m", scheme="nested")
    live = load(tmp_path / "m", model, device=DEVICE, kernels="integer")
    places = {name: buffer.data_ptr() for name, buffer in live.named_buffers()}
    rng = random.Random(1)
    plan = random_plan(live, rng)
    for setting in (2, random_plan(live, rng), 8, (3, 8), plan):
        set_bits(live, setting)
    fresh = load(tmp_path / "m", model, device=DEVICE, kernels="integer")
    equal(live, fresh, x, plan)
    assert {name: buffer.data_ptr() for name, buffer in live.named_buffers()} == places


def test_transitional_norms(tmp_path: Path) -> None:
    model, x = make("residual", tmp_path / "m")
    prepared = add_transitions(prepare(model, QuantConfig(bit_choices=BITS), x.cpu()))
    generator = torch.Generator().manual_seed(0)
    for name, buffer in prepared.named_buffers():
        if name.endswith("running_mean"):
            buffer.normal_(0, 0.2, generator=generator)
    save(prepared, tmp_path / "t")
    live, exact = (load(tmp_path / "t", model, device=DEVICE, kernels=kind) for kind in ("integer", "float"))
    rng = random.Random(2)
    for setting in (8, 2, random_plan(live, rng), random_plan(live, rng)):
        equal(live, code_exact(exact), x, setting)


# --- what is fused --------------------------------------------------------------------------------


def in_use(live: nn.Module) -> list[Call]:
    targets = {node.target for node in live._fused[0].graph.nodes}
    return [module for name, module in live._fused[0].named_modules() if name in targets and isinstance(module, Call)]


def test_codes_go_from_layer_to_layer(tmp_path: Path) -> None:
    model, _ = make("inverted", tmp_path / "m", keep_first_last=False)
    live = load(tmp_path / "m", model, device=DEVICE, kernels="integer")
    calls = in_use(live)
    found = [(type(c).__name__, len(c.readers), c.keep_value, c.relu_max, c.norm is None) for c in calls]
    assert found == [
        ("ValueCall", 1, False, None, True),  # the image
        ("LayerCall", 1, True, 6.0, False),
        ("LayerCall", 1, False, 6.0, False),
        ("LayerCall", 1, False, 6.0, False),
        ("LayerCall", 0, True, None, False),  # with the addition, for the pool
        ("ValueCall", 1, False, None, True),
        ("LayerCall", 0, True, None, True),
    ]


def test_four_readers_share_two_quantizers_each(tmp_path: Path) -> None:
    model, _ = make("linear", tmp_path / "m", keep_first_last=False)
    live = load(tmp_path / "m", model, device=DEVICE, kernels="integer")
    assert sorted(len(call.readers) for call in in_use(live)) == [0, 0, 0, 0, 1, 1, 2, 2]


def test_codes_are_taken_where_they_are_used_if_values_change_in_place(tmp_path: Path) -> None:
    model, _ = make("in place", tmp_path / "m", keep_first_last=False)
    live = load(tmp_path / "m", model, device=DEVICE, kernels="integer")
    assert not any(call.readers for call in in_use(live) if isinstance(call, LayerCall))


def test_hooks_are_not_passed_by(tmp_path: Path) -> None:
    model, x = make("linear", tmp_path / "m")
    live = load(tmp_path / "m", model, device=DEVICE, kernels="float")
    seen: list[str] = []
    live.second.register_forward_hook(lambda *args: seen.append("second"))
    IntegerModel(live)(x)
    assert seen == ["second"]


# --- a live model like any other ------------------------------------------------------------------


def test_one_image_without_a_batch(tmp_path: Path) -> None:
    model, x = make("in place", tmp_path / "m", keep_first_last=False)
    live, exact = (load(tmp_path / "m", model, device=DEVICE, kernels=kind) for kind in ("integer", "float"))
    equal(live, code_exact(exact), x[0], 4)


def test_sequences_of_vectors(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    x = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(0))
    save(prepare(model, QuantConfig(bit_choices=BITS, keep_first_last=False), x), tmp_path / "m")
    live, exact = (load(tmp_path / "m", model, device=DEVICE, kernels=kind) for kind in ("integer", "float"))
    equal(live, code_exact(exact), x.to(DEVICE), 3)
    equal(live, code_exact(exact), x.to(DEVICE)[:, 0], 3)
    equal(live, code_exact(exact), x.to(DEVICE)[:, :, :].half(), 3)


def test_copies_and_the_exact_model_of_an_integer_model(tmp_path: Path) -> None:
    model, x = make("inverted", tmp_path / "m", scheme="nested")
    live = load(tmp_path / "m", model, device=DEVICE, kernels="integer")
    exact, twin = code_exact(live), copy.deepcopy(live)
    assert not any(isinstance(module, IntegerEngine) for module in exact.modules())
    set_bits(live, 2)
    equal(twin, exact, x, 4)
    assert {layer.weight_bits for layer in dialled_layers(live).values()} == {2}
    equal(live, exact, x, 3)


def test_other_weights_and_statistics_can_be_loaded(tmp_path: Path) -> None:
    model, x = make("inverted", tmp_path / "m")
    live = load(tmp_path / "m", model, device=DEVICE, kernels="integer")
    state = {name: t.flip(0) if t.dim() else t for name, t in live.state_dict().items()}
    live.load_state_dict(state)
    equal(live, code_exact(live), x, 8)
    fresh = load(tmp_path / "m", model, device=DEVICE, kernels="integer")
    with torch.no_grad():
        assert not torch.equal(live(x), fresh(x))


def test_inputs_that_no_code_stands_for(tmp_path: Path) -> None:
    model, x = make("inverted", tmp_path / "m", keep_first_last=False)
    live = load(tmp_path / "m", model, device=DEVICE, kernels="integer")
    for bad in (float("nan"), float("inf")):
        worse = x.clone()
        worse[0, 0, 0, 0] = bad
        with pytest.raises(QuantizationError, match="NaN or infinity"):
            live(worse)
    with pytest.raises(QuantizationError, match=r"layer 'stem\.0': its input is torch\.float64"):
        live(x.double())
    with pytest.raises(QuantizationError, match=r"layer 'stem\.0': its input is \(2, 2, 9, 8\), expected \(3, height"):
        live(x[:, :2])


@pytest.mark.skipif(INTERPRETED, reason="the interpreter does not know fake tensors")
@pytest.mark.parametrize(("net", "scheme"), [("inverted", "double_rounding"), ("residual", "nested")])
def test_torch_compile(net: str, scheme: str, tmp_path: Path) -> None:
    model, x = make(net, tmp_path / "m", scheme=scheme, keep_first_last=False)
    live = load(tmp_path / "m", model, device=DEVICE, kernels="integer")
    compiled = torch.compile(live, backend="aot_eager", fullgraph=True)
    for bits in (4, 8, 4):
        equal(compiled, code_exact(live), x, bits)


@pytest.mark.cuda
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("recorded_at", [8, 4])
@pytest.mark.parametrize("scheme", ["double_rounding", "nested", "dorefa"])
@pytest.mark.parametrize("net", ["residual", "inverted", "linear"])
def test_a_recorded_graph_follows_the_dial(net: str, scheme: str, recorded_at: int, tmp_path: Path) -> None:
    model, x = make(net, tmp_path / "m", scheme=scheme)
    live = load(tmp_path / "m", model, device=DEVICE)
    assert isinstance(live, IntegerModel)
    exact, graph = code_exact(live), torch.cuda.CUDAGraph()
    set_bits(live, recorded_at)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        live(x)
    side.synchronize()
    with torch.cuda.graph(graph):
        out = live(x)
    rng = random.Random(3)
    for setting in (*BITS, random_plan(live, rng), (4, 8), random_plan(live, rng)):
        set_bits(live, setting)
        set_bits(exact, setting)
        graph.replay()
        assert torch.equal(out, exact(x)), setting
        assert torch.equal(out, live(x)), setting


# --- where it is used -----------------------------------------------------------------------------


def test_the_cpu_runs_float_kernels_unless_told(tmp_path: Path) -> None:
    model, _ = make("inverted", tmp_path / "m")
    assert not isinstance(load(tmp_path / "m", model), IntegerModel)


def test_a_gpu_that_lacks_something_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make("inverted", tmp_path / "m")
    artifact = read_artifact(tmp_path / "m")
    monkeypatch.setattr(kernel_choice, "missing_on", lambda device: "its compute capability is 7.5, below 8.0")
    kernel_choice._say_once.cache_clear()
    caplog.clear()  # of what save says
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert kernel_choice.choose_kernels(artifact, torch.device("cuda"), None, None) == "float"
    assert [record.message for record in caplog.records] == [
        "no integer kernels on cuda: its compute capability is 7.5, below 8.0; float kernels run instead"
    ]
    kernel_choice._say_once.cache_clear()


def test_a_gpu_runs_integer_kernels_if_all_activations_are_quantised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_choice, "missing_on", lambda device: None)
    for activations in ("auto", "float"):
        make("inverted", tmp_path / "m", activations=activations)
        artifact = read_artifact(tmp_path / "m")
        chosen = kernel_choice.choose_kernels(artifact, torch.device("cuda"), None, None)
        assert chosen == ("integer" if activations == "auto" else "float")
    make("inverted", tmp_path / "m", group_size=2)  # which integer kernels do not serve: exact sums would run, slowly
    artifact = read_artifact(tmp_path / "m")
    assert any(entry["group_size"] for entry in artifact.layers.values())
    assert kernel_choice.choose_kernels(artifact, torch.device("cuda"), None, None) == "float"


@pytest.mark.skipif(INTERPRETED, reason="nothing here is about kernels")
def test_exports_are_those_of_float_kernels(tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    model, x = make("inverted", tmp_path / "m", keep_first_last=False)
    files = []
    for kernels in ("float", "integer"):
        live = load(tmp_path / "m", model, device=DEVICE, kernels=kernels)
        for which in (live, code_exact(live)):
            files.append(export_onnx(which, tmp_path / "m.onnx", x, bits=4).path.read_bytes())
    assert len(set(files)) == 1


def test_norms_cannot_be_recalibrated(tmp_path: Path) -> None:
    model, x = make("inverted", tmp_path / "m")
    live = load(tmp_path / "m", model, device=DEVICE, kernels="integer")
    for fixed in (live, code_exact(live)):
        with pytest.raises(TrainingError, match=r"load\(path, kernels='float'\)"):
            recalibrate_norms(fixed, [x], 4)
        equal(live, fixed, x, 4)


def test_the_float_weight_takes_no_memory(tmp_path: Path) -> None:
    model, _ = make("inverted", tmp_path / "m")
    live = load(tmp_path / "m", model, device=DEVICE, kernels="integer")
    layer = dialled_layers(live)["project.0"]
    assert isinstance(layer.engine, IntegerEngine)
    assert (layer.engine.integers.dtype, layer.engine.integers.numel()) == (torch.int8, 160)
    weights = layer.weight_shape.numel()
    assert all(t.numel() < weights for t in layer.buffers() if t.is_floating_point())
