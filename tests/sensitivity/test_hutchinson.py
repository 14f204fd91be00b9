"""Hessian traces: against full Hessians computed here by autograd, and with the error that they claim."""

import dataclasses
import json
import logging
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

import bitdial
from bitdial import BitPlan, OwnLosses, QuantConfig, Sensitivity, batched, hessian_trace, set_bits
from bitdial.cli import main
from bitdial.errors import ArtifactError, BitdialError, ConfigError
from bitdial.files.container import read_container, write_container
from bitdial.sensitivity.hutchinson import LEAST_SAMPLES
from bitdial.sensitivity.result import LayerSensitivity

LAYERS = ["conv", "linear"]


class Net(nn.Module):
    """Two layers that `prepare` quantises, `conv` and `linear`, between two that it keeps; norms in between."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 2, 3, padding=1)
        self.stem_norm = nn.BatchNorm2d(2)
        self.conv = nn.Conv2d(2, 3, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(3)
        self.drop = nn.Dropout(0.5)
        self.linear = nn.Linear(12, 5)
        self.head = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem_norm(self.stem(x)))
        x = torch.relu(self.norm(self.conv(x)))
        return self.head(torch.relu(self.linear(self.drop(x.flatten(1)))))


class Grouped(nn.Module):
    """Grouped, depthwise and multiplying convolutions in every geometry, the last of them kept in float."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.grouped = nn.Conv2d(4, 6, (3, 1), padding="same", dilation=(2, 1), groups=2)
        self.depthwise = nn.Conv2d(6, 6, 3, stride=(2, 1), padding=(1, 2), dilation=(1, 2), groups=6, bias=False)
        self.multiplied = nn.Conv2d(6, 12, (1, 3), padding=(0, 1), padding_mode="circular", groups=6)
        self.head = nn.Conv2d(12, 4, (2, 4), padding="valid", groups=4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.depthwise(torch.tanh(self.grouped(torch.tanh(self.stem(x))))))
        return self.head(torch.tanh(self.multiplied(x))).flatten(1)


def prepare(net: nn.Module, config: QuantConfig, x: Tensor) -> nn.Module:
    """bitdial's, in the dtype of `net`: traces are compared in float64, of values that float32 has too."""
    return bitdial.prepare(net, config, x).to(next(net.parameters()).dtype)


GROUPED_LAYERS = ["grouped", "depthwise", "multiplied"]


def make_grouped() -> nn.Module:
    """In float64, with a loss that bends enough for traces that stand out of their error."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(2)
        net = Grouped().double()
        net.head.weight.mul_(3)
    return net.float().double()


def make_net(seed: int = 0) -> nn.Module:
    """In training mode, float64, with norms that do something."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = Net().double()
        for norm in (net.stem_norm, net.norm):
            for tensor in (norm.weight, norm.running_var):
                nn.init.uniform_(tensor, 0.5, 1.5)
            nn.init.normal_(norm.running_mean, std=0.3)
    return net.float().double()


def make_data(count: int = 11, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 1, 4, 4, dtype=torch.float64, generator=generator)
    return x, torch.randint(0, 4, (count,), generator=generator)


def full_hessian(
    model: nn.Module, layer: str, x: Tensor, y: Tensor, loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy
) -> Tensor:
    """The Hessian (n, n) of the loss in one layer's weight, by autograd on every pair of entries."""
    model, key = model.eval(), f"{layer}.weight"
    weight = model.get_submodule(layer).weight.detach()

    def value(flat: Tensor) -> Tensor:
        return loss(functional_call(model, {key: flat.view_as(weight)}, (x,)), y)

    return torch.autograd.functional.hessian(value, weight.flatten())


def quiet(model: nn.Module, batches: Any, **settings: Any) -> Sensitivity:
    return hessian_trace(model, batches, **{"progress": False, **settings})


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- the estimate is right ----------------------------------------------------------------------------


def test_the_loss_of_a_part_of_the_output() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_net()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, self.net(x)

    layers = [f"net.{name}" for name in LAYERS]
    found = quiet(Pair(), [make_data()], layers=layers, output=1, most_samples=4)
    alone = quiet(make_net(), [make_data()], layers=LAYERS, most_samples=4)
    assert list(found.layers.values()) == list(alone.layers.values())


def test_traces_equal_those_of_the_full_hessian_within_their_error() -> None:
    net, (x, y) = make_net(), make_data()
    model = prepare(net, QuantConfig(), x)
    found = quiet(model, [(x, y)], tolerance=0, most_samples=400)
    assert list(found.layers) == LAYERS
    assert found.images == len(x)
    for name, entry in found.layers.items():
        hessian = full_hessian(net, name, x, y)
        off_diagonal = hessian - torch.diag(hessian.diagonal())
        error = math.sqrt(2 * float(off_diagonal.square().sum()) / 400)  # the estimator's, exactly
        assert entry.samples == 400
        assert entry.parameters == len(hessian)
        assert entry.error == pytest.approx(error, rel=0.2)
        assert entry.error < 0.1 * abs(float(hessian.trace())), "or the next line says little"
        assert entry.trace == pytest.approx(float(hessian.trace()), abs=4 * error)
        assert entry.normalized == entry.trace / entry.parameters


@pytest.mark.parametrize("prepared", [False, True])
def test_traces_of_grouped_convolutions_equal_those_of_the_full_hessian(prepared: bool) -> None:
    net, (x, y) = make_grouped(), make_data()
    names = [*GROUPED_LAYERS, "head"]
    found = quiet(prepare(net, QuantConfig(), x) if prepared else net, [(x, y)], layers=names, most_samples=400)
    for name, entry in found.layers.items():
        exact = float(full_hessian(net, name, x, y).trace())
        assert entry.error <= 0.1 * abs(entry.trace)
        assert entry.trace == pytest.approx(exact, abs=4 * entry.error)


def test_over_seeds_the_estimates_are_unbiased_and_their_errors_honest() -> None:
    net, (x, y) = make_net(), make_data()
    exact = {name: float(full_hessian(net, name, x, y).trace()) for name in LAYERS}
    runs = [
        quiet(net, [(x, y)], layers=LAYERS, tolerance=0, most_samples=32, generator=seeded(s)).layers for s in range(40)
    ]
    for name in LAYERS:
        away = np.array([(run[name].trace - exact[name]) / run[name].error for run in runs])
        assert abs(away.mean()) < 4 / math.sqrt(len(runs))
        assert 0.7 < away.std() < 1.4


def test_more_samples_shrink_the_error_as_one_over_the_square_root() -> None:
    net, (x, y) = make_net(), make_data()
    exact = {name: float(full_hessian(net, name, x, y).trace()) for name in LAYERS}
    stated: dict[int, list[float]] = {}
    actual: dict[int, list[float]] = {}
    for count in (8, 32, 128):
        runs = [
            quiet(net, [(x, y)], layers=LAYERS, tolerance=0, most_samples=count, generator=seeded(s)).layers
            for s in range(20)
        ]
        stated[count] = [math.sqrt(np.mean([run[n].error ** 2 for run in runs])) for n in LAYERS]
        actual[count] = [math.sqrt(np.mean([(run[n].trace - exact[n]) ** 2 for run in runs])) for n in LAYERS]
    for i in range(len(LAYERS)):
        for few, many in ((8, 32), (32, 128)):
            assert stated[few][i] / stated[many][i] == pytest.approx(2, rel=0.2)
        assert actual[8][i] / actual[128][i] == pytest.approx(4, rel=0.45)


def test_batches_add_up_to_the_whole() -> None:
    net, (x, y) = make_net(), make_data(11)
    whole = quiet(net, [(x, y)], layers=LAYERS, most_samples=20)
    for size in (1, 4, 5):  # 11 = 4 + 4 + 3: the last counts less
        parts = quiet(net, batched(x, y, size), layers=LAYERS, most_samples=20)
        assert parts.images == whole.images == 11
        for name in LAYERS:
            assert parts.layers[name].trace == pytest.approx(whole.layers[name].trace, rel=1e-10)
            assert parts.layers[name].error == pytest.approx(whole.layers[name].error, rel=1e-10)


def test_the_seed_decides_everything_and_nothing_else_does() -> None:
    net, (x, y) = make_net(), make_data()
    before = torch.random.get_rng_state()
    first = quiet(net, [(x, y)], layers=LAYERS, generator=seeded(5))
    torch.rand(7)
    assert quiet(net, [(x, y)], layers=LAYERS, generator=seeded(5)) == first
    assert quiet(net, [(x, y)], layers=LAYERS, generator=seeded(6)) != first
    assert quiet(net, [(x, y)], layers=LAYERS) == quiet(net, [(x, y)], layers=LAYERS)
    torch.random.set_rng_state(before)
    quiet(net, [(x, y)], layers=LAYERS)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_float32_gives_nearly_the_same() -> None:
    net, (x, y) = make_net(), make_data()
    double = quiet(net, [(x, y)], layers=LAYERS, most_samples=20)
    single = quiet(net.float(), [(x.float(), y)], layers=LAYERS, most_samples=20)
    for name in LAYERS:
        assert single.layers[name].trace == pytest.approx(double.layers[name].trace, rel=1e-4)


def test_a_negative_trace_is_kept() -> None:
    net, (x, y) = make_net(), make_data()

    def saddle(output: Tensor, target: Tensor) -> Tensor:
        return -output.square().mean()

    exact = float(full_hessian(net, "linear", x, y, saddle).trace())
    assert exact < 0
    entry = quiet(net, [(x, y)], layers=["linear"], loss=saddle, tolerance=0.05).layers["linear"]
    assert entry.trace == pytest.approx(exact, abs=4 * entry.error)
    assert entry.normalized < 0
    assert entry.error <= 0.05 * abs(entry.trace), "the tolerance is on the absolute trace"


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("make, layers", [(make_net, LAYERS), (make_grouped, GROUPED_LAYERS)])
def test_a_gpu_gives_the_same(make: Callable[[], nn.Module], layers: list[str]) -> None:
    net, (x, y) = make(), make_data()
    here = quiet(net, batched(x, y, 4), layers=layers, most_samples=20)
    there = quiet(net.cuda(), batched(x.cuda(), y.cuda(), 4), layers=layers, most_samples=20)
    for name in layers:
        assert there.layers[name].trace == pytest.approx(here.layers[name].trace, rel=1e-9)


# --- what it costs ------------------------------------------------------------------------------------


class Calls(TorchDispatchMode):
    """Counts the operators that run within it."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def count_calls(groups: int) -> int:
    """Of a trace that passes a grouped convolution of its own and one kept in float."""
    first, second = (nn.Conv2d(32, 32, 3, padding=1, groups=groups) for _ in range(2))
    net = nn.Sequential(nn.Conv2d(1, 32, 1), nn.Tanh(), first, nn.Tanh(), second, nn.Flatten(), nn.Linear(512, 4))
    x, y = make_data()
    with Calls() as calls:
        quiet(net, [(x.float(), y)], layers=["0", "2"], most_samples=2)
    return calls.count


def test_more_groups_do_not_take_more_operators() -> None:
    few = count_calls(2)
    assert few > 100, "or nothing was counted"
    assert count_calls(8) == few
    assert count_calls(32) == few


# --- when it stops ------------------------------------------------------------------------------------


def test_a_layer_whose_hessian_is_diagonal_needs_no_more_than_the_least() -> None:
    """With one-hot inputs and a squared loss every weight stands alone, and every vector gives the exact trace."""
    model = nn.Sequential(nn.Linear(6, 3, bias=False, dtype=torch.float64))
    x, y = torch.eye(6, dtype=torch.float64), torch.zeros(6, 3, dtype=torch.float64)
    entry = quiet(model, [(x, y)], layers=["0"], loss=F.mse_loss).layers["0"]
    assert entry.samples == LEAST_SAMPLES
    assert entry.trace == pytest.approx(2.0, rel=1e-12)  # 18 weights, each with 2 / 18
    assert entry.error == pytest.approx(0, abs=1e-12)


def test_each_layer_stops_by_itself_at_the_tolerance(caplog: pytest.LogCaptureFixture) -> None:
    net, (x, y) = make_net(), make_data()
    found = quiet(net, [(x, y)], layers=LAYERS, tolerance=0.06, most_samples=2000).layers
    assert len({entry.samples for entry in found.values()}) == len(LAYERS)
    for entry in found.values():
        assert LEAST_SAMPLES <= entry.samples < 2000
        assert entry.error <= 0.06 * abs(entry.trace)
    assert not caplog.records


def test_what_is_not_within_the_tolerance_is_said(caplog: pytest.LogCaptureFixture) -> None:
    net, (x, y) = make_net(), make_data()
    with caplog.at_level(logging.WARNING):
        found = quiet(net, [(x, y)], layers=LAYERS, tolerance=1e-4, most_samples=18)
    assert {entry.samples for entry in found.layers.values()} == {18}
    (record,) = caplog.records
    assert "2 of 2 layers are not within the tolerance of 0.0001 after 18 samples" in record.getMessage()


def test_a_dead_layer_has_the_trace_zero() -> None:
    net, (x, y) = make_net(), make_data()
    with torch.no_grad():
        net.norm.bias.fill_(-1e3)  # the ReLU behind the convolution never opens
    entry = quiet(net, [(x, y)], layers=["conv"]).layers["conv"]
    assert (entry.trace, entry.error, entry.samples) == (0.0, 0.0, LEAST_SAMPLES)


# --- which function is differentiated -----------------------------------------------------------------


def test_a_prepared_model_gives_the_traces_of_its_float_model_at_any_setting() -> None:
    net, (x, y) = make_net(), make_data()
    expected = quiet(net, [(x, y)], layers=LAYERS, most_samples=20)
    for scheme in ("double_rounding", "nested", "truncate", "lsq"):
        model = prepare(net, QuantConfig(scheme=scheme, bit_choices=(4, 3, 2)), x)
        for setting in (4, 2, BitPlan({"conv": 2}, default=(3, 4))):
            set_bits(model, setting)
            assert quiet(model, [(x, y)], most_samples=20) == expected


@pytest.mark.parametrize("scheme", ["adabits", "dorefa"])
def test_schemes_that_round_the_tanh_are_differentiated_in_it(scheme: str) -> None:
    net, (x, y) = make_net(), make_data()
    found = quiet(prepare(net, QuantConfig(scheme=scheme), x), [(x, y)], most_samples=20)
    with torch.no_grad():
        for name in LAYERS:
            net.get_submodule(name).weight.tanh_()
    expected = quiet(net, [(x, y)], layers=LAYERS, most_samples=20)
    for name in LAYERS:
        assert found.layers[name].trace == pytest.approx(expected.layers[name].trace, rel=1e-12)


def test_norms_take_the_set_of_the_highest_width() -> None:
    net, (x, y) = make_net(), make_data()
    model = prepare(net, QuantConfig(), x)
    before = quiet(model, [(x, y)], most_samples=20)
    with torch.no_grad():
        for bits in ("6", "4", "2"):
            model.norm.sets[bits].running_var.mul_(9)
    assert quiet(model, [(x, y)], most_samples=20) == before
    with torch.no_grad():
        model.norm.sets["8"].running_var.mul_(9)
    assert quiet(model, [(x, y)], most_samples=20).layers["conv"].trace != before.layers["conv"].trace


def test_the_model_is_left_as_it_is() -> None:
    net, (x, y) = make_net(), make_data()
    model = prepare(net, QuantConfig(), x)
    set_bits(model, BitPlan({"conv": 2}, default=4))
    model.train()
    model.norm.eval()
    model.head.requires_grad_(False)
    F.cross_entropy(model(x), y).backward()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    gradients = {key: None if p.grad is None else p.grad.clone() for key, p in model.named_parameters()}
    modes, wanted = [m.training for m in model.modules()], [p.requires_grad for p in model.parameters()]
    with torch.no_grad():
        quiet(model, [(x, y)], most_samples=4)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    for key, parameter in model.named_parameters():
        assert (parameter.grad is None) == (gradients[key] is None)
        assert parameter.grad is None or torch.equal(parameter.grad, gradients[key])
    assert [m.training for m in model.modules()] == modes
    assert [p.requires_grad for p in model.parameters()] == wanted
    assert bitdial.get_bits(model) == BitPlan({"conv": 2, "linear": 4})


class Tied(nn.Module):
    """`left` and `right` have one weight."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.stem, self.left, self.right, self.head = (nn.Linear(4, 4).double() for _ in range(4))
        if tied:
            self.right.weight = self.left.weight
        else:
            self.right.weight = nn.Parameter(self.left.weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.right(self.left(self.stem(x).tanh()).tanh()).tanh())


def test_layers_that_share_a_weight_have_each_the_trace_of_its_own_use() -> None:
    x, y = torch.randn(9, 4, dtype=torch.float64, generator=seeded(0)), torch.arange(9) % 4
    names = ["left", "right"]
    expected = quiet(Tied(tied=False), [(x, y)], layers=names, most_samples=40)
    assert quiet(prepare(Tied(tied=True), QuantConfig(), x), [(x, y)], most_samples=40) == expected
    assert quiet(Tied(tied=True), [(x, y)], layers=names, most_samples=40) == expected
    for name in names:
        exact = float(full_hessian(Tied(tied=False), name, x, y).trace())
        assert expected.layers[name].trace == pytest.approx(exact, abs=4 * expected.layers[name].error)


def test_a_part_of_the_layers_of_a_prepared_model_and_those_kept_in_float() -> None:
    net, (x, y) = make_net(), make_data()
    found = quiet(prepare(net, QuantConfig(), x), [(x, y)], layers=["linear", "head"], tolerance=0.05)
    assert list(found.layers) == ["linear", "head"]
    for name, entry in found.layers.items():
        assert entry.trace == pytest.approx(float(full_hessian(net, name, x, y).trace()), abs=4 * entry.error)


def test_attention_has_two_derivatives() -> None:
    """Its fast kernels have one only."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = bitdial.build_model("tiny_transformer", vocab=8, width=8, depth=1, heads=2, max_length=4).double()
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.5)
    x, y = torch.randint(0, 8, (6, 4), generator=seeded(0)), torch.arange(6) % 2
    layers = list(quiet(prepare(model, QuantConfig(), x), [(x, y)], most_samples=2).layers)
    assert any("attention" in name for name in layers)
    for name, entry in quiet(model, [(x, y)], layers=layers, most_samples=400, tolerance=0.08).layers.items():
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            exact = float(full_hessian(model, name, x, y).trace())
        assert entry.trace == pytest.approx(exact, abs=4 * entry.error), name


def test_batches_of_several_arguments() -> None:
    class Sum(Net):
        def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x * scale[:, None, None, None])

    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = Sum().double()
    x, y = make_data()
    scale = torch.full((len(x),), 2.0, dtype=torch.float64)
    found = quiet(net, [({"x": x, "scale": scale}, y)], layers=LAYERS, most_samples=4)
    net.__class__ = Net
    assert found == quiet(net, [(2 * x, y)], layers=LAYERS, most_samples=4)


# --- what cannot be done is explained -----------------------------------------------------------------


class Once(torch.autograd.Function):
    """The identity, with one derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def l1(output: Tensor, target: Tensor) -> Tensor:
    return (output - F.one_hot(target, 4)).abs().mean()


def flash(output: Tensor, target: Tensor) -> Tensor:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(*[output[None, None]] * 3).square().mean()


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no quantised layer": ({"layers": None}, r"no quantised layer; call prepare.*layers=\["),
    "no layer named": ({"layers": []}, "no quantised layer"),
    "unknown layer": ({"layers": ["conv", "conv9"]}, "layer 'conv9': .*not in the model"),
    "a module without a weight": ({"layers": ["drop"]}, "layer 'drop': .*a Dropout without one"),
    "a layer twice": ({"layers": ["conv", "conv"]}, "each once"),
    "one text": ({"layers": "conv"}, "must be a list of layer names"),
    "no batches": ({"batches": []}, "no batches"),
    "an empty batch": ({"batches": [(torch.zeros(0, 1, 4, 4), torch.zeros(0).long())]}, "batch 0 is empty"),
    "not pairs": ({"batches": [torch.zeros(2, 1, 4, 4)]}, "batch 0 is not a pair"),
    "a label of no class": (
        {"batches": [make_data(), (make_data()[0], make_data()[1] + 50)]},
        r"batch 1: the label 5\d is none of the model's \d classes, 0 to \d; check the targets",
    ),
    "a negative label": (
        {"batches": [(make_data()[0], make_data()[1] * 0 - 1)], "loss": nn.CrossEntropyLoss()},
        "batch 0: the label -1 is none of",
    ),
    "NaN loss": ({"loss": lambda o, t: F.cross_entropy(o, t) * math.nan}, "batch 0: the loss is nan"),
    "NaN data": ({"batches": [make_data(), (make_data()[0] * math.inf, make_data()[1])]}, "batch 1: the loss is nan"),
    "a loss for each sample": ({"loss": lambda o, t: F.cross_entropy(o, t, reduction="none")}, r"one number.*\(11,\)"),
    "a loss that is no tensor": ({"loss": lambda o, t: 1.0}, "one number.*float"),
    "a detached loss": ({"loss": lambda o, t: F.cross_entropy(o.detach(), t)}, "does not depend on any"),
    "an L1 loss": ({"loss": l1}, "layer 'conv': the loss is not twice differentiable.*L1"),
    "a linear loss": ({"loss": lambda o, t: o.mean()}, "not twice differentiable"),
    "once differentiable": (
        {"loss": lambda o, t: F.cross_entropy(Once.apply(o.double()), t)},
        "layer 'conv': the loss cannot be differentiated twice: .*once_differentiable",
    ),
    "not differentiable twice": (
        {"loss": flash},
        "layer 'conv': the loss cannot be differentiated twice: .*not implemented",
    ),
    "negative tolerance": ({"tolerance": -0.1}, "tolerance=-0.1"),
    "NaN tolerance": ({"tolerance": math.nan}, "tolerance=nan"),
    "one sample": ({"most_samples": 1}, "most_samples must be a whole number of at least 2, got 1"),
    "a seed": ({"generator": 0}, r"generator=0 must be a torch.Generator: torch.Generator\(\).manual_seed\(0\)"),
    "half a sample": ({"most_samples": 2.5}, "most_samples must be a whole number"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str) -> None:
    change, match = BAD[case]
    arguments = {"batches": [make_data()], "layers": LAYERS, **change}
    with pytest.raises(ConfigError, match=match):
        quiet(make_net(), arguments.pop("batches"), **arguments)


def test_a_layer_that_never_runs() -> None:
    net, batch = make_net(), make_data()
    net.spare = nn.Linear(2, 2, dtype=torch.float64)
    with pytest.raises(ConfigError, match=r"layer 'spare': the loss does not depend on its weight on any batch"):
        quiet(net, [batch], layers=["conv", "spare"])


def test_half_precision_and_live_models_are_refused(tmp_path: Path) -> None:
    net, (x, y) = make_net().float(), make_data()
    bitdial.save(prepare(net, QuantConfig(), x.float()), tmp_path / "file")
    with pytest.raises(ConfigError, match="load_trainable"):
        quiet(bitdial.load(tmp_path / "file", net), [(x.float(), y)])
    with pytest.raises(ConfigError, match=r"layer 'conv': its weight is torch.bfloat16"):
        quiet(net.bfloat16(), [(x.bfloat16(), y)], layers=LAYERS)


def test_progress_is_shown_where_rich_is_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    net, batch = make_net(), make_data()
    shown = hessian_trace(net, [batch], layers=LAYERS, most_samples=4)
    out, text = capsys.readouterr()
    assert "Hessian trace" in text
    assert out == "", "results alone are on stdout"
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    assert hessian_trace(net, [batch], layers=LAYERS, most_samples=4) == shown
    assert capsys.readouterr() == ("", "")


# --- keeping it ---------------------------------------------------------------------------------------


def example(**changes: Any) -> Sensitivity:
    conv = {"trace": 1.5, "error": 0.25, "parameters": 54, "samples": 16, **changes}
    linear = LayerSensitivity(trace=-1e-9, error=0, parameters=60, samples=200)
    return Sensitivity(layers={"conv": LayerSensitivity(**conv), "linear": linear}, images=11)


def test_a_file_gives_back_what_was_saved(tmp_path: Path) -> None:
    net, batch = make_net(), make_data()
    for found in (quiet(net, [batch], layers=LAYERS), example()):
        found.save(tmp_path / "deep" / "s.json")
        assert Sensitivity.load(tmp_path / "deep" / "s.json") == found
        assert Sensitivity.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    with pytest.raises(BitdialError, match="cannot write"):
        found.save(tmp_path / "deep")


def without(key: str) -> Callable[[dict[str, Any]], None]:
    return lambda values: values["layers"]["conv"].pop(key)


def with_value(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda values: values["layers"]["conv"].update({key: value})


NUMBERS: list[Any] = [None, True, "1", [], [[]], {}, math.nan, math.inf, -math.inf, 10**400]
COUNTS: list[Any] = [None, True, "9", [], {}, 1.0, 54.0, 0, -1, 2**63, 10**400, math.nan]
CHANGES: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    *((without(key), f"layer 'conv'.*'{key}' is missing") for key in ("trace", "error", "parameters", "samples")),
    *((with_value(key, value), f"layer 'conv'.*{key}") for key in ("trace", "error") for value in NUMBERS),
    *((with_value(key, value), f"layer 'conv'.*{key}") for key in ("parameters", "samples") for value in COUNTS),
    *((lambda values, v=value: values.update(images=v), "images") for value in COUNTS),
    (with_value("error", -1e-9), "error must be a finite number of at least 0"),
    (with_value("samples", 1), "samples must be a whole number of at least 2"),
    (with_value("hook", "os.system"), "layer 'conv'.*unknown.*hook"),
    (lambda values: values.update(extra=1), "unknown.*extra"),
    (lambda values: values.pop("images"), "'images' is missing"),
    (lambda values: values.pop("layers"), "'layers' is missing"),
    (lambda values: values.update(layers={}), "at least one"),
    (lambda values: values.update(layers=[1]), "must map layer names"),
    (lambda values: values["layers"].update(conv=[1]), "layer 'conv'.*expected a dict"),
]


@pytest.mark.parametrize("number", range(len(CHANGES)))
def test_a_bad_file_is_refused(tmp_path: Path, number: int) -> None:
    change, match = CHANGES[number]
    values, path = example().to_dict(), tmp_path / "s.json"
    change(values)
    path.write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=match) as caught:
        Sensitivity.load(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "1", "[" * 100_000, "\udcff"])
def test_a_file_that_is_not_json_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "s.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=r"s\.json is not"):
        Sensitivity.load(path)
    with pytest.raises(ConfigError, match="cannot read"):
        Sensitivity.load(tmp_path / "missing.json")


@pytest.fixture
def model() -> nn.Module:
    return prepare(make_net().float(), QuantConfig(start="3std"), make_data()[0].float())


def test_the_artifact_keeps_it(tmp_path: Path, model: nn.Module) -> None:
    x, y = make_data()
    found = quiet(model, [(x.float(), y)])
    bitdial.save(model, tmp_path / "with", sensitivity=found)
    bitdial.save(model, tmp_path / "without")
    kept, bare = bitdial.read_artifact(tmp_path / "with"), bitdial.read_artifact(tmp_path / "without")
    assert kept.sensitivity == found
    assert bare.sensitivity is None
    live = bitdial.load(tmp_path / "with", make_net().float())
    assert torch.equal(live(x.float()), bitdial.load(tmp_path / "without", make_net().float())(x.float()))
    again = bitdial.load_trainable(kept, make_net().float())
    assert set(quiet(again, [(x.float(), y)]).layers) == set(found.layers)


def test_an_artifact_of_another_model_or_kind_is_not_written(tmp_path: Path, model: nn.Module) -> None:
    cases = [
        (example(parameters=55), "'conv' is that of 55 weights, but it has 54"),
        (Sensitivity(layers={"stem": example().layers["conv"]}, images=1), "layer 'stem', which is not a quantised"),
        (example().to_dict(), "sensitivity is a dict"),
    ]
    for wrong, match in cases:
        with pytest.raises(ArtifactError, match=match):
            bitdial.save(model, tmp_path / "file", sensitivity=wrong)  # type: ignore[arg-type]
    assert not (tmp_path / "file").exists()


@pytest.fixture
def parts(tmp_path: Path, model: nn.Module) -> tuple[Path, dict[str, Tensor], dict[str, Any]]:
    """A file with a sensitivity, and what is in it."""
    path = tmp_path / "file"
    bitdial.save(model, path, sensitivity=example())
    tensors, manifest, _ = read_container(path, error=ArtifactError)
    return path, tensors, manifest


def test_a_bad_sensitivity_in_an_artifact_is_refused(
    parts: tuple[Path, dict[str, Tensor], dict[str, Any]],
) -> None:
    path, tensors, manifest = parts
    wrong: list[tuple[Any, str]] = [(value, ".") for value in (True, 1, "x", [], {}, [[]], {"": None})]
    for change, match in CHANGES:
        values = example().to_dict()
        change(values)
        if "nan" not in repr(values) and "inf" not in repr(values):  # which no manifest can hold
            wrong.append((values, match))
    for name, entry in (("stem", {}), ("conv", {"parameters": 53}), ("", {})):
        layers = {name: {**example().to_dict()["layers"]["conv"], **entry}}
        wrong.append(({"layers": layers, "images": 1}, f"layer '{name}'"))
    for values, match in wrong:
        write_container(path, tensors, {**manifest, "sensitivity": values}, error=ArtifactError)
        with pytest.raises(ArtifactError, match=match) as caught:
            bitdial.read_artifact(path)
        assert type(caught.value) is ArtifactError


def test_a_file_says_that_it_has_none(parts: tuple[Path, dict[str, Tensor], dict[str, Any]]) -> None:
    path, tensors, manifest = parts
    assert bitdial.read_artifact(path).sensitivity == example()
    write_container(path, tensors, {**manifest, "sensitivity": None}, error=ArtifactError)
    assert bitdial.read_artifact(path).sensitivity is None
    del manifest["sensitivity"]
    write_container(path, tensors, manifest, error=ArtifactError)
    with pytest.raises(ArtifactError, match="'sensitivity' is missing"):
        bitdial.read_artifact(path)


# --- the command --------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """An artifact of a network that bitdial ships, for images of 8 x 8, that does not say what it was trained on."""
    torch.manual_seed(0)
    net = bitdial.build_model("cifar_resnet", blocks=1, width=4, in_channels=1)
    config = bitdial.QuantConfig(bit_choices=(4, 2))
    bitdial.save(
        bitdial.prepare(net, config, torch.rand(8, 1, 8, 8, generator=seeded(1))), tmp_path / "file.safetensors"
    )
    return tmp_path / "file.safetensors"


def test_the_command_equals_the_library(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x, y = torch.rand(20, 1, 8, 8, generator=seeded(0)), torch.arange(20) % 10
    np.savez(tmp_path / "data.npz", x=x.numpy(), y=y.numpy())
    command = ["sensitivity", str(file), "--data", str(tmp_path / "data.npz"), "--seed", "3"]
    command += ["--most-samples", "6", "--images", "12", "--out", str(tmp_path / "s.json")]
    assert main(command) == 0
    text = capsys.readouterr().out
    found = Sensitivity.load(tmp_path / "s.json")
    generator = seeded(3)
    chosen = torch.randperm(20, generator=generator)[:12]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # where the command works
    model, batch = bitdial.load_trainable(file).to(device), (x[chosen].to(device), y[chosen].to(device))
    expected = quiet(model, [batch], most_samples=6, generator=generator)
    if device.type == "cpu":
        assert found == expected
    for name, entry in expected.layers.items():  # a GPU adds in an order of its own at each run
        assert dataclasses.asdict(found.layers[name]) == pytest.approx(dataclasses.asdict(entry), rel=1e-3)
    assert found.images == 12
    assert bitdial.read_artifact(file).sensitivity == found
    for name, entry in found.layers.items():
        row = next(line for line in text.splitlines() if line.startswith(f"{name} "))
        figures = [f"{entry.parameters:,}", f"{entry.trace:.4g}", f"{entry.error:.2g}", f"{entry.normalized:.3g}"]
        assert row.split() == [name, *figures]


def test_the_command_takes_training_images_of_the_digits(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = file.read_bytes()
    command = ["sensitivity", str(file), "--data", "digits", "--images", "9", "--most-samples", "2", "--no-store"]
    assert main(command) == 0
    assert file.read_bytes() == before
    assert "on 9 images" in capsys.readouterr().out.replace("\n", " ")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([], "does not say where its training data is"),
        (["--data", "nowhere"], "not digits, a folder or a file"),
        (["--data", "FOLDER"], "CIFAR-10 was not found"),
        (["--data", "SHAPE"], "does not fit the model"),
        (["--data", "digits", "--tolerance", "-1"], "tolerance=-1.0"),
        (["--data", "digits", "--most-samples", "1"], "most_samples"),
    ],
)
def test_the_command_explains_wrong_input(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], data: list[str], words: str
) -> None:
    np.savez(tmp_path / "shape.npz", x=np.zeros((4, 3, 9), np.float32), y=np.zeros(4, np.int64))
    places = {"FOLDER": str(tmp_path), "SHAPE": str(tmp_path / "shape.npz")}
    assert main(["sensitivity", str(file), *(places.get(part, part) for part in data)]) == 1
    error = capsys.readouterr().err
    assert words in error
    assert "Traceback" not in error


def test_a_detector_has_the_trace_of_its_own_loss() -> None:
    """Of a quadratic loss in a layer that is called twice: 2 x^2 for each call's input x, summed."""

    class TwoLevels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared, self.norm = nn.Conv2d(1, 1, 1, bias=False), nn.BatchNorm2d(1)

        def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]] | None = None) -> Any:
            levels = [self.shared(images[0][None]), self.shared(images[0][None, :, ::2, ::2])]
            assert self.training
            assert not self.norm.training
            assert targets is not None
            pairs = zip(levels, targets[0].values(), strict=True)
            return {"loss_boxes": sum((a - b).square().sum() for a, b in pairs), "other": levels[0].sum().exp()}

    image = torch.rand(1, 2, 2)
    target = {"a": torch.zeros(1, 1, 2, 2), "b": torch.zeros(1, 1, 1, 1)}
    found = hessian_trace(
        TwoLevels(), [([image], [target])], layers=["shared"], loss=OwnLosses(weights={"other": 0}), progress=False
    )
    expected = 2 * float(image.square().sum() + image[0, 0, 0].square())
    assert found.layers["shared"].trace == pytest.approx(expected, rel=1e-5)
    assert found.images == 1
