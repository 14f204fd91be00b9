"""Exported files hold our codes in true 8-, 4- and 2-bit integers, and onnxruntime computes what we compute."""

import itertools
import json
import logging
import random
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from bitdial import (
    BitPlan,
    QuantConfig,
    add_transitions,
    build_model,
    export_onnx,
    get_bits,
    load,
    onnx_session_options,
    prepare,
    save,
    set_bits,
)
from bitdial import functional as bf
from bitdial.dial.dial import dialled_layers
from bitdial.errors import ConfigError, ExportError, MissingDependencyError, PlanError
from bitdial.live.layers import LiveLayer

from .conftest import FLOAT_ERROR, WIDTHS, check_against, images, run_file, run_with_codes, session, stored_codes

CONTAINER = {8: 8, 7: 8, 6: 8, 5: 8, 4: 4, 3: 4, 2: 2}
TYPES = {8: onnx.TensorProto.INT8, 4: onnx.TensorProto.INT4, 2: onnx.TensorProto.INT2}
# Those with a scale for each token are for Linear layers, and in test_onnx_layers.py.
STATIC = [kind for kind in bf.ACTIVATION_KINDS if kind != "dynamic"]
DIGITS = {"blocks": 1, "width": 16, "in_channels": 1}  # as the recipe has it


def random_plan(model: nn.Module, seed: int) -> BitPlan:
    draw = random.Random(seed)
    names = dialled_layers(model)
    widths = next(iter(names.values())).bit_choices
    return BitPlan({name: (draw.choice(widths), draw.choice(widths)) for name in names})


# --- whole networks -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def networks(make_live: Callable[..., nn.Module]) -> Callable[[str], tuple[nn.Module, Tensor]]:
    """The demo's network, ResNet20 or ResNet18 with random weights, and images for it; made once."""
    made: dict[str, tuple[nn.Module, Tensor]] = {}

    def get(name: str) -> tuple[nn.Module, Tensor]:
        if name not in made:
            size, channels = {"demo": (8, 1), "resnet20": (32, 3), "resnet18": (64, 3)}[name]
            with torch.random.fork_rng():
                torch.manual_seed(3)
                model = build_model("cifar_resnet", **DIGITS) if name == "demo" else build_model(name)
            calibration = images(8, channels=channels, size=size)
            made[name] = make_live(model, calibration), images(7, channels=channels, size=size, count=3)
        return made[name]

    return get


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Our own warnings."""
    return [r.getMessage() for r in caplog.records if r.name.startswith("bitdial") and r.levelno == logging.WARNING]


# Every width of the smallest; of the larger ones a plan of all widths: what they have besides is in their layers.
SETTINGS: dict[str, tuple[int | str, ...]] = {
    "demo": (*WIDTHS, "mixed"),
    "resnet20": ("mixed",),
    "resnet18": ("mixed",),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_onnxruntime_runs_every_setting_of_a_network(
    networks: Callable[[str], tuple[nn.Module, Tensor]], name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    live, x = networks(name)
    size: dict[int | str, int] = {}
    for setting in SETTINGS[name]:
        caplog.clear()
        set_bits(live, random_plan(live, 11) if setting == "mixed" else setting)
        done = export_onnx(live, tmp_path / "net.onnx", x[:1])
        codes = sum(layer.codes.stored.numel() for layer in live.modules() if isinstance(layer, LiveLayer))
        assert check_against(done.path, live, x) <= 1e-4 * codes
        model = onnx.load(done.path)
        for layer, (weight_bits, _) in get_bits(live).items():
            found, tensor = stored_codes(model, layer)
            packed = dialled_layers(live)[layer]
            assert isinstance(packed, LiveLayer)
            assert np.array_equal(found, packed.codes.weight_codes(weight_bits).numpy()), layer
            container = CONTAINER[weight_bits]
            assert done.weights[layer] == (weight_bits, container)
            assert tensor.data_type == TYPES[container]
            assert len(tensor.raw_data) == -(-found.size * container // 8)
        size[setting] = done.bytes
        assert done.path.stat().st_size == done.bytes
        if setting != "mixed":
            assert len(said(caplog)) == (setting in (6, 3)), "said where codes take more than their bits"
    if name == "demo":  # fewer bits make smaller files
        weights = sum(layer.codes.stored.numel() for layer in live.modules() if isinstance(layer, LiveLayer))
        others = 4096  # the Clips and the IR version, not weights
        assert 0 <= size[4] - (size[8] - weights // 2) < others
        assert 0 <= size[2] - (size[8] - weights * 3 // 4) < others


# --- kinds of layers and schemes ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scheme", "per_channel"),
    [*((name, True) for name in bf.SCHEMES), ("nested+8", True), ("double_rounding", False), ("nested", False)],
)
def test_every_scheme(mixed: Callable[..., nn.Module], scheme: str, per_channel: bool, tmp_path: Path) -> None:
    live = mixed(scheme=scheme, per_channel=per_channel)
    set_bits(live, random_plan(live, 5))
    x = images(2, channels=2, size=10)
    done = export_onnx(live, tmp_path / "net.onnx", x)
    check_against(done.path, live, x)
    offsets = [n for n in onnx.load(done.path).graph.node if n.op_type == "Add" and "weight_offset" in n.input[1]]
    plain = {"nested": 8, "nested+8": 4}.get(scheme)  # where the offset is 0: codes stand for themselves
    below = sum(bits != plain for bits, _ in done.weights.values())
    assert len(offsets) == (below if scheme in ("nested", "nested+8", "centred", "dorefa") else 0)


@pytest.mark.parametrize("kind", STATIC)
def test_every_kind_of_activation(mixed: Callable[..., nn.Module], kind: str, tmp_path: Path) -> None:
    live = mixed(activations=kind, widths=(8, 7, 5, 3, 2))
    x = images(2, channels=2, size=10)
    widths = itertools.cycle((8, 7, 5, 3, 2))  # each of them for weights, and each for activations
    pairs = [(next(widths), bits) for bits in (2, 8, 5, 7, 3, 2)]
    plan = BitPlan(dict(zip(get_bits(live), pairs, strict=True)))
    done = export_onnx(live, tmp_path / "net.onnx", x, bits=plan)
    set_bits(live, plan)
    check_against(done.path, live, x)
    assert done.weights == {name: (bits, CONTAINER[bits]) for name, (bits, _) in plan.items()}


class Fan(nn.Module):
    """A linear layer for each width, all on the same input."""

    def __init__(self) -> None:
        super().__init__()
        self.at = nn.ModuleList(nn.Linear(1, 2) for _ in range(2, 9))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([layer(x) for layer in self.at], dim=1)


@pytest.mark.parametrize("kind", STATIC)
def test_input_codes_are_ours_on_every_border(make_live: Callable[..., nn.Module], kind: str, tmp_path: Path) -> None:
    """Values on, just below and just above each border between codes, far outside, and at random; no tolerance."""
    calibration = torch.randn(64, 1, generator=torch.Generator().manual_seed(0))
    calibration = calibration.abs() if kind == "unsigned" else calibration
    widths = (8, 7, 6, 5, 4, 3, 2)
    live = make_live(Fan(), calibration, widths=widths, activations=kind, keep_first_last=False)
    set_bits(live, BitPlan({f"at.{i}": bits for i, bits in enumerate(widths)}))
    layers = {name: layer for name, layer in dialled_layers(live).items() if isinstance(layer, LiveLayer)}
    parts = [torch.tensor([0.0, -0.0, 1e30, -1e30])]
    for layer in layers.values():
        scale, _ = layer.codes.act_parameters(layer.act_bits)
        borders = (torch.arange(-300, 300) + 0.5) * scale
        parts += [borders, *(torch.nextafter(borders, torch.tensor(sign)) for sign in (torch.inf, -torch.inf))]
        parts += [torch.randn(2000, generator=torch.Generator().manual_seed(1)) * 100 * scale]
    x = torch.cat(parts)[:, None]
    found = run_with_codes(export_onnx(live, tmp_path / "fan.onnx", x).path, x).codes
    for name, layer in layers.items():
        expected = bf.quantize_activation(
            x, *layer.codes.act_parameters(layer.act_bits), bits=layer.act_bits, kind=kind
        ).numpy()
        codes = found[f"{name}.input_codes"]
        assert np.array_equal(codes, expected), name
        assert codes.dtype == expected.dtype
        assert len(np.unique(codes)) == 2**layer.act_bits


def test_weight_only_layers(mixed: Callable[..., nn.Module], tmp_path: Path) -> None:
    live = mixed(activations="float")
    x = images(2, channels=2, size=10)
    for plan in (8, BitPlan({"conv": 2, "tokens": 2, "reflect": 3}, default=4)):
        done = export_onnx(live, tmp_path / "net.onnx", x, bits=plan)
        set_bits(live, plan)
        assert check_against(done.path, live, x) == 0


@pytest.mark.parametrize("transitions", ["full", "statistics"])
def test_the_norm_set_of_the_setting_is_exported(tmp_path: Path, transitions: str) -> None:
    """Also a transitional norm's, which goes by the widths of two layers."""
    x = images(3, channels=1, size=8)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = prepare(build_model("cifar_resnet", blocks=1, width=4, in_channels=1).eval(), QuantConfig(), x)
    model = add_transitions(model, transitions)
    generator = torch.Generator().manual_seed(1)
    for name, value in model.named_parameters():
        if ".sets." in name:
            value.data.add_(torch.rand(value.shape, generator=generator))
    save(model.eval(), tmp_path / "model.safetensors")
    live = load(tmp_path / "model.safetensors")
    for seed in range(2 if transitions == "full" else 1):
        set_bits(live, random_plan(live, seed))
        check_against(export_onnx(live, tmp_path / "net.onnx", x).path, live, x)


class Twice(nn.Module):
    """One layer that runs twice, and two layers on one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.again = nn.Linear(8, 8)
        self.left = nn.Linear(8, 8)
        self.right = nn.Linear(8, 8)
        self.right.weight = self.left.weight
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.again(torch.relu(self.again(torch.relu(self.stem(x)))))
        return self.head(self.right(torch.relu(self.left(x))))


def test_shared_layers_and_weights(make_live: Callable[..., nn.Module], tmp_path: Path) -> None:
    live = make_live(Twice(), torch.randn(32, 6, generator=torch.Generator().manual_seed(0)))
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    done = export_onnx(live, tmp_path / "net.onnx", x, bits=4)
    set_bits(live, 4)
    check_against(done.path, live, x)
    held = [t for t in onnx.load(done.path).graph.initializer if t.data_type == onnx.TensorProto.INT4]
    assert len(held) == 2, "the shared weight is stored once"
    set_bits(live, BitPlan({"left": 8, "right": 2}, default=4))
    done = export_onnx(live, tmp_path / "net.onnx", x)
    check_against(done.path, live, x)
    assert done.weights == {"again": (4, 4), "left": (8, 8), "right": (2, 2)}


def test_a_transformer_of_linears(make_live: Callable[..., nn.Module], tmp_path: Path) -> None:
    tokens = torch.randint(0, 256, (16, 12), generator=torch.Generator().manual_seed(0))
    live = make_live("tiny_transformer", tokens)
    set_bits(live, random_plan(live, 2))
    check_against(export_onnx(live, tmp_path / "net.onnx", tokens[:2]).path, live, tokens)


class Encoder(nn.Module):
    """PyTorch's own encoder layer between float layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.stem(x)).mean(dim=1))


def test_pytorchs_encoder_layer(make_live: Callable[..., nn.Module], tmp_path: Path) -> None:
    x = torch.randn(8, 5, 6, generator=torch.Generator().manual_seed(0))
    live = make_live(Encoder(), x)
    for bits in (8, 3):
        set_bits(live, bits)
        check_against(export_onnx(live, tmp_path / "net.onnx", x).path, live, x)


# --- the file -------------------------------------------------------------------------------------


def test_what_the_file_says(mixed: Callable[..., nn.Module], tmp_path: Path) -> None:
    live = mixed(scheme="nested")
    plan = random_plan(live, 4)
    before = {key: value.clone() for key, value in live.state_dict().items()}
    set_bits(live, 6)
    level = logging.getLogger("torch.onnx").level
    done = export_onnx(live, tmp_path / "net.onnx", images(2, channels=2, size=10), bits=plan)
    assert logging.getLogger("torch.onnx").level == level, "torch is not left quiet"
    assert get_bits(live) == BitPlan(dict.fromkeys(plan, 6)), "the model keeps its setting"
    assert all(torch.equal(value, before[key]) for key, value in live.state_dict().items())
    model = onnx.load(done.path)
    facts = {p.key: p.value for p in model.metadata_props}
    assert facts["bitdial.scheme"] == "nested"
    assert facts["bitdial.plan"] == json.dumps(plan.to_dict())
    assert (model.producer_name, model.opset_import[0].version) == ("bitdial", done.opset)
    assert [i.name for i in model.graph.input] == ["x"]
    assert [o.name for o in model.graph.output] == ["output"]
    data = done.path.read_bytes()
    assert len(data) == done.bytes
    for trace in (b"site-packages", str(Path.home()).encode(), str(tmp_path).encode(), b".py"):
        assert trace not in data, "nothing of this machine is in the file"


def test_the_batch_is_free_or_fixed(mixed: Callable[..., nn.Module], tmp_path: Path) -> None:
    live = mixed()
    x = images(2, channels=2, size=10, count=5)
    free = export_onnx(live, tmp_path / "free.onnx", x[:1], bits=4).path
    fixed = export_onnx(live, tmp_path / "fixed.onnx", x[:1], bits=4, dynamic_batch=False).path
    together = run_file(free, x)
    for count in (1, 2, 5):
        assert run_file(free, x[:count]).shape == (count, 3)
    np.testing.assert_allclose(run_file(fixed, x[:1]), together[:1], rtol=1e-5, atol=1e-6)
    with pytest.raises(onnxruntime.capi.onnxruntime_pybind11_state.InvalidArgument):
        run_file(fixed, x)


def test_keyword_and_several_inputs(make_live: Callable[..., nn.Module], tmp_path: Path) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.inner, self.head = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2)

        def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
            hidden = self.inner(torch.relu(self.stem(left) + self.stem(right)))
            return self.head(hidden), hidden

    left, right = (torch.randn(6, 4, generator=torch.Generator().manual_seed(i)) for i in (0, 1))
    live = make_live(Two(), (left, right))
    with torch.no_grad():
        expected = [part.numpy() for part in live(left, right)]
    for sample in ((left, right), {"left": left[:1], "right": right[:1]}):
        path = export_onnx(live, tmp_path / "two.onnx", sample).path
        found = session(path).run(None, {"left": left.numpy(), "right": right.numpy()})
        assert [o.name for o in session(path).get_outputs()] == ["output_0", "output_1"]
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("opset", [21, 24])
def test_two_bits_without_int2(
    mixed: Callable[..., nn.Module], opset: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    live = mixed()
    x = images(2, channels=2, size=10)
    done = export_onnx(live, tmp_path / "net.onnx", x, bits=2, opset=opset)
    set_bits(live, 2)
    check_against(done.path, live, x)
    assert set(done.weights.values()) == {(2, 4)}
    assert said(caplog) == [
        f"{done.path}: 6 layer(s) of 2 bits take 4 bits a weight, INT4: opset {opset} has no smaller integer for them"
    ]


def test_it_is_said_where_codes_take_more_than_their_bits(
    mixed: Callable[..., nn.Module], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    live = mixed()
    x = images(2, channels=2, size=10)
    export_onnx(live, tmp_path / "net.onnx", x, bits=BitPlan({"conv": 6}, default=3))
    three, six = said(caplog)
    assert "5 layer(s) of 3 bits take 4 bits a weight" in three
    assert "1 layer(s) of 6 bits take 8 bits a weight" in six


# --- the session ----------------------------------------------------------------------------------


def test_the_options_that_ship_give_parity(make_live: Callable[..., nn.Module], tmp_path: Path) -> None:
    """Without them onnxruntime rounds the input of a weight-only linear layer on three axes to 8 bits."""
    net = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))
    x = torch.randn(4, 7, 32, generator=torch.Generator().manual_seed(0))
    live = make_live(net, x, activations="float")
    path = export_onnx(live, tmp_path / "net.onnx", x, bits=8).path
    with torch.no_grad():
        expected = live(x).numpy()
    assert np.abs(run_file(path, x) - expected).max() <= FLOAT_ERROR * np.abs(expected).max()


def test_two_bit_weights_before_a_quantizer_load(make_live: Callable[..., nn.Module], tmp_path: Path) -> None:
    """Without the options onnxruntime makes a QLinearConv of them, which knows no INT2."""
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 3, bias=False), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 3)
    )
    x = images(2, channels=2, size=10)
    live = make_live(net, x)
    path = export_onnx(live, tmp_path / "net.onnx", x, bits=(2, 8)).path
    set_bits(live, (2, 8))
    check_against(path, live, x)


def test_biases_are_not_rounded_under_default_options(make_live: Callable[..., nn.Module], tmp_path: Path) -> None:
    """Inside a Conv or Gemm between quantizers they would be, to multiples of the product of both scales."""
    hidden = [layer for _ in range(3) for layer in (nn.Linear(16, 16), nn.ReLU())]
    net = nn.Sequential(*hidden, nn.Linear(16, 4))
    with torch.no_grad():
        for value in net.parameters():
            value.copy_(torch.randn(value.shape, generator=torch.Generator().manual_seed(value.numel())) / 4)
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    live = make_live(net, x)
    for bits in (8, 3, 2):  # of each container; at fewer bits the steps are coarser
        path = export_onnx(live, tmp_path / "net.onnx", x, bits=bits).path
        set_bits(live, bits)
        with torch.no_grad():
            expected = live(x).numpy()
        found = run_file(path, x, onnxruntime.SessionOptions())
        assert np.abs(found - expected).max() <= FLOAT_ERROR * np.abs(expected).max(), bits


# --- what goes wrong ------------------------------------------------------------------------------


def test_settings_that_do_not_fit(mixed: Callable[..., nn.Module], tmp_path: Path) -> None:
    live = mixed()
    x = images(2, channels=2, size=10)
    target = tmp_path / "net.onnx"
    with pytest.raises(PlanError, match=r"layer 'conv': bits=5 is not in bit_choices \(8, 6, 4, 3, 2\)"):
        export_onnx(live, target, x, bits=5)
    with pytest.raises(PlanError, match="the plan names 'layer9'"):
        export_onnx(live, target, x, bits=BitPlan({"layer9": 4}, default=8))
    with pytest.raises(PlanError, match="'small' is not a bit-width and not the name of a stored plan"):
        export_onnx(live, target, x, bits="small")
    for opset in (20, 26, "21", True):
        with pytest.raises(ConfigError, match=r"opset=.* is not supported; choose 21"):
            export_onnx(live, target, x, opset=opset)  # type: ignore[arg-type]
    assert not target.exists()
    assert get_bits(live)["conv"] == (8, 8)


def test_models_that_are_not_live(tmp_path: Path) -> None:
    x = torch.randn(8, 4)
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    with pytest.raises(ConfigError, match=r"layer '2' is a QuantLinear; export_onnx takes a live model"):
        export_onnx(prepare(net, QuantConfig(), x), tmp_path / "net.onnx", x)
    with pytest.raises(PlanError, match="has no quantised layer"):
        export_onnx(net, tmp_path / "net.onnx", x)


def test_a_sample_that_does_not_fit(mixed: Callable[..., nn.Module], tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"the model does not run on the sample: .*channels"):
        export_onnx(mixed(), tmp_path / "net.onnx", torch.zeros(1, 3, 10, 10))


def test_a_path_that_cannot_be_written(mixed: Callable[..., nn.Module], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(ExportError, match=r"cannot write .*net.onnx"):
        export_onnx(mixed(), tmp_path / "file" / "net.onnx", images(2, channels=2, size=10))


@pytest.mark.parametrize("package", ["onnx", "onnxscript"])
def test_without_the_extra(
    mixed: Callable[..., nn.Module], package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingDependencyError, match=rf"{package} is not installed; .*pip install 'bitdial\[onnx\]'"):
        export_onnx(mixed(), tmp_path / "net.onnx", images(2, channels=2, size=10))


def test_options_without_onnxruntime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingDependencyError, match="onnxruntime is not installed"):
        onnx_session_options()
