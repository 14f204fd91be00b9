"""What a plan costs, counted by hand, and against the sizes of files."""

import json
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitdial import BitPlan, QuantConfig, Rule, build_model, get_bits, load, prepare, read_artifact, save, set_bits
from bitdial.artifact import sizes
from bitdial.errors import BitdialError, ConfigError, PlanError
from bitdial.planning.cost import QUANTITIES, as_written, measure_costs


class Net(nn.Module):
    """stem and head in float; a convolution in two groups with a bias and a norm, a linear layer without a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1, bias=False)
        self.conv = nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2)
        self.norm = nn.BatchNorm2d(6)
        self.linear = nn.Linear(6, 5, bias=False)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.conv(torch.relu(self.stem(x)))))
        return self.head(torch.relu(self.linear(x.mean(dim=(2, 3)))))


ONE = torch.randn(1, 2, 6, 6, generator=torch.Generator().manual_seed(0))


def prepared(model: nn.Module | None = None, batch: Any = ONE, **config: Any) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return prepare(model or Net(), QuantConfig(**{"start": "3std", **config}), batch)


def test_layers_by_hand() -> None:
    costs = measure_costs(prepared(), ONE)
    conv, linear = costs.layers["conv"], costs.layers["linear"]
    assert list(costs.layers) == ["conv", "linear"]
    # 6 filters over 2 of the 4 channels, 3x3, on a 3x3 output; its input is 4 x 6 x 6
    assert (conv.weights, conv.out_channels, conv.macs, conv.inputs) == (6 * 2 * 9, 6, 6 * 9 * 2 * 9, 4 * 36)
    assert (linear.weights, linear.out_channels, linear.macs, linear.inputs) == (30, 5, 30, 6)
    assert conv.scale_bytes == 4 * 6 + 4 * 6 + 4  # weight scales, bias, activation scale
    assert linear.scale_bytes == 4 * 5 + 4
    assert conv.norm_bytes == 4 * 4 * 6 + 8  # weight, bias, mean, variance; a counter
    assert linear.norm_bytes == 0
    assert costs.float_bytes == 4 * (72 + 15 + 3)


def test_a_plan_by_hand() -> None:
    costs = measure_costs(prepared(bit_choices=(8, 4, 3, 2)), ONE)
    assert costs.of(BitPlan({"conv": (3, 4), "linear": (8, 2)})) == {
        "average_bits": (108 * 3 + 30 * 8) / 138,
        "layer_average_bits": 5.5,
        "bytes": 41 + 30 + (24 + 24 + 4) + (20 + 4) + 104 + 360,  # 108 x 3 bits are 40.5 bytes
        "bitops": 972 * 3 * 4 + 30 * 8 * 2,
        "activation_bytes": 72 + 2,  # 144 x 4 bits, 6 x 2 bits
    }
    assert costs.of(4)["average_bits"] == costs.of(4)["layer_average_bits"] == 4
    assert costs.of(4)["bitops"] == 1002 * 16
    json.dumps(costs.of(4))


def test_operations_are_those_of_the_whole_sample() -> None:
    one, four = measure_costs(prepared(), ONE).of(4), measure_costs(prepared(), ONE.repeat(4, 1, 1, 1)).of(4)
    for name, factor in {"bitops": 4, "activation_bytes": 4, "bytes": 1, "average_bits": 1}.items():
        assert four[name] == factor * one[name]


def test_a_float_input_counts_32_bits_and_is_not_stored() -> None:
    costs = measure_costs(prepared(rules=(Rule(pattern="linear", activations="float"),)), ONE)
    assert costs.of((4, 2))["bitops"] == 972 * 4 * 2 + 30 * 4 * 32
    assert costs.of((4, 2))["activation_bytes"] == 36
    assert costs.layers["linear"].scale_bytes == 20


def test_latency_is_a_sum_over_the_table() -> None:
    table: Any = {"conv": {8: 0.3, (4, 8): 0.2, 4: 0.1}, "linear": {8: 2, (8, 8): 1, 4: 0.2}}
    costs = measure_costs(prepared(), ONE, latency=table)
    assert costs.quantities == QUANTITIES
    assert costs.of(4)["latency"] == 0.3  # not 0.30000000000000004
    assert costs.of(8)["latency"] == 1.3  # a pair goes before a width
    assert costs.of(BitPlan({"conv": (4, 8), "linear": 4}))["latency"] == 0.4
    with pytest.raises(PlanError, match="'conv': the latency table has no entry for weight bits 2"):
        costs.of(2)
    assert "latency" not in measure_costs(prepared(), ONE).of(4)


@pytest.mark.parametrize(
    "table, message",
    [
        ({"conv": {8: 1.0}}, "lacks layer 'linear'"),
        ({"conv": {}, "linear": {}, "stem": {}}, "names 'stem'"),
        ({"conv": {8: -1.0}, "linear": {}}, "'conv': latency -1.0 at 8"),
        ({"conv": {8: 1.0}, "linear": {4: float("nan")}}, "'linear': latency nan"),
        ({"conv": {8: "fast"}, "linear": {}}, "'fast'"),
    ],
)
def test_wrong_latency_tables(table: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        measure_costs(prepared(), ONE, latency=table)


class Twice(nn.Module):
    """A convolution used twice, two linear layers on one weight, a float parameter with two names."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 5, 3, padding=1)
        self.conv = nn.Conv2d(5, 5, 3, padding=1)
        self.norm = nn.BatchNorm2d(5)
        self.again = self.conv
        self.left = nn.Linear(5, 5)
        self.right = nn.Linear(5, 5, bias=False)
        self.right.weight = self.left.weight
        self.gain = nn.Parameter(torch.ones(3))
        self.same_gain = self.gain
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.conv(torch.relu(self.stem(x)))))
        x = self.again(x).square().mean(dim=(2, 3))
        return self.head(self.right(self.left(x).abs())) * self.gain


def test_shared_modules_and_weights() -> None:
    costs = measure_costs(prepared(Twice()), ONE)
    assert costs.layers["conv"].macs == 2 * 5 * 36 * 45
    assert costs.layers["conv"].inputs == 2 * 5 * 36
    assert costs.layers["right"].tied_to == "left"
    assert costs.layers["right"].scale_bytes == 4
    together, apart = costs.of(4), costs.of(BitPlan({"right": 8}, default=4))
    assert apart["bytes"] - together["bytes"] == 25  # codes of 8 bits beside those of 4
    assert together["average_bits"] == 4


@pytest.mark.parametrize("model, shape", [(Net, (1, 2, 6, 6)), (Twice, (1, 2, 6, 6))])
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"bit_choices": (3, 2), "per_channel": False, "activations": "asymmetric"},
        {"bit_choices": (8, 5), "activations": "float"},
        {"switch_norms": False},
        {"scheme": "lsq", "bit_choices": (8, 4)},
    ],
    ids=str,
)
def test_bytes_are_those_of_a_separate_file(
    tmp_path: Path, model: Callable[[], nn.Module], shape: tuple[int, ...], config: Any
) -> None:
    ready = prepared(model(), **config)
    save(ready, tmp_path / "file")
    costs = measure_costs(ready, torch.zeros(shape))
    separate = sizes(read_artifact(tmp_path / "file"))["separate"]
    assert {bits: costs.of(bits)["bytes"] for bits in separate} == separate


def test_bytes_of_a_shipped_model(tmp_path: Path) -> None:
    batch = torch.rand(2, 3, 16, 16)
    ready = prepared(build_model("cifar_resnet", blocks=1), batch)
    save(ready, tmp_path / "file")
    costs = measure_costs(ready, batch[:1])
    separate = sizes(read_artifact(tmp_path / "file"))["separate"]
    assert {bits: costs.of(bits)["bytes"] for bits in separate} == separate


def test_measuring_changes_nothing() -> None:
    model = prepared().train()
    model.get_submodule("norm").eval()
    set_bits(model, BitPlan({"conv": 2, "linear": (4, 8)}))
    before, state = get_bits(model), {k: v.clone() for k, v in model.state_dict().items()}
    measure_costs(model, ONE)
    assert get_bits(model) == before
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert model.training
    assert not model.get_submodule("norm").training
    assert not any(module._forward_hooks for module in model.modules())


def test_inputs_by_name_and_by_position() -> None:
    model = prepared()
    assert measure_costs(model, {"x": ONE}) == measure_costs(model, (ONE,)) == measure_costs(model, ONE)


def test_a_model_inside_another() -> None:
    inner = prepared()
    costs = measure_costs(nn.Sequential(inner), ONE)
    assert list(costs.layers) == ["0.conv", "0.linear"]
    assert costs.of(4) == measure_costs(inner, ONE).of(4)


class Branch(Net):
    """Its linear layer can be left out."""

    def forward(self, x: Tensor, short: bool = False) -> Tensor:
        if not short:
            return super().forward(x)
        return torch.relu(self.norm(self.conv(torch.relu(self.stem(x)))))


def test_a_layer_that_does_not_run_is_named() -> None:
    with pytest.raises(ConfigError, match="'linear' did not run on the sample"):
        measure_costs(prepared(Branch()), (ONE, True))


def test_models_that_cannot_be_measured(tmp_path: Path) -> None:
    with pytest.raises(BitdialError, match="no quantised layer"):
        measure_costs(Net(), ONE)
    save(prepared(), tmp_path / "file")
    with pytest.raises(ConfigError, match=r"'conv' is a LiveLayer; .*load_trainable"):
        measure_costs(load(tmp_path / "file", Net()), ONE)


@pytest.mark.parametrize(
    "plan, message",
    [
        (BitPlan({"other": 4}, default=4), "names 'other'"),
        (BitPlan({"conv": 4}), "nothing about 'linear'"),
        (BitPlan(default=5), "'conv': bits=5 is not in bit_choices"),
    ],
)
def test_a_plan_for_another_model(plan: BitPlan, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        measure_costs(prepared(), ONE).of(plan)


def test_numbers_are_read_as_written() -> None:
    assert as_written(2.3) == Fraction(23, 10)
    assert as_written(3) == 3
    assert as_written(1e-7) == Fraction(1, 10**7)
    assert as_written(torch.tensor(0.5).item()) == Fraction(1, 2)
