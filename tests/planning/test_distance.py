"""The distance of outputs from a reference's: the KL divergence by hand, what is averaged, what is refused."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitdial import BitPlan, LayerOutputs, QuantConfig, build_model, get_bits, prepare, set_bits
from bitdial.errors import BitdialError, ConfigError, QuantizationError
from bitdial.planning.distance import OutputDistance, kl_divergence, relative_error
from bitdial.prepare.model_call import evaluating


@pytest.fixture(scope="module")
def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3)).eval()


@pytest.fixture(scope="module")
def model(net: nn.Module) -> nn.Module:
    return prepare(net, QuantConfig(bit_choices=(8, 4, 2), keep_first_last=False), torch.randn(32, 5)).eval()


def by_hand(output: Tensor, reference: Tensor) -> float:
    total = 0.0
    for found, wanted in zip(output.tolist(), reference.tolist(), strict=True):
        p, q = ([math.exp(v) / sum(map(math.exp, row)) for v in row] for row in (wanted, found))
        total += sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    return total / len(output)


def measured(model: nn.Module, batches: Any, reference: Any, plan: BitPlan, **settings: Any) -> float:
    with evaluating(model):
        return OutputDistance(model, batches, reference, **settings)(plan)


def test_kl_is_that_of_the_definition() -> None:
    torch.manual_seed(1)
    output, reference = torch.randn(7, 4) * 3, torch.randn(7, 4)
    assert kl_divergence(output, reference) == pytest.approx(by_hand(output, reference), rel=1e-6)
    assert kl_divergence(output, reference) != pytest.approx(kl_divergence(reference, output), rel=0.01)
    assert kl_divergence(reference, reference) == 0
    assert kl_divergence(reference + 5, reference) == pytest.approx(0, abs=1e-9)  # logits, not probabilities


def test_samples_count_alike_whatever_the_batches_are(model: nn.Module, net: nn.Module) -> None:
    x, plan = torch.randn(10, 5), BitPlan(default=2)
    set_bits(model, 2)
    with torch.no_grad():
        wanted = by_hand(model(x), net(x))
    for batches in (x, [x], [x[:7], x[7:]], [(x[:1],), {"input": x[1:]}]):
        assert measured(model, batches, net, plan) == pytest.approx(wanted, rel=1e-5)
    with evaluating(model):
        assert OutputDistance(model, [x[:7], x[7:]], net).samples == 10


def test_the_reference_is_a_model_its_outputs_or_the_highest_width(model: nn.Module, net: nn.Module) -> None:
    x, plan = [torch.randn(4, 5), torch.randn(3, 5)], BitPlan(default=2)
    set_bits(model, 8)
    with torch.no_grad():
        high, outputs = [model(one) for one in x], [net(one) for one in x]
    assert measured(model, x, outputs, plan) == measured(model, x, net, plan)
    set_bits(model, 4)
    assert measured(model, x, None, plan) == measured(model, x, high, plan)
    assert measured(model, x, None, BitPlan(default=8)) == 0
    with evaluating(model):
        said = [OutputDistance(model, x, given).reference for given in (net, outputs, None)]
    assert said == ["the given model", "the given outputs", "the model at its highest width"]
    net.train()
    measured(model, x, net, plan)
    assert net.training  # runs in eval mode, and is as it was
    net.eval()


def test_the_distance_from_a_plan_is_from_its_outputs(model: nn.Module, net: nn.Module) -> None:
    x = [torch.randn(4, 5), torch.randn(3, 5)]
    with evaluating(model):
        whole = OutputDistance(model, x, net, output=lambda y: y * 2)
        there = whole.from_plan(BitPlan(default=4))
        assert there(BitPlan(default=4)) == 0
        found, before = there(BitPlan(default=2)), whole(BitPlan(default=2))
        set_bits(model, 4)
        outputs = [2 * model(one) for one in x]
        set_bits(model, 2)
        wanted = by_hand(2 * model(torch.cat(x)), torch.cat(outputs))
        assert found == pytest.approx(wanted, rel=1e-5)
        assert whole(BitPlan(default=2)) == before  # it is as it was


def test_own_distances_and_parts_of_outputs(model: nn.Module, net: nn.Module) -> None:
    x, plan = torch.randn(6, 5), BitPlan(default=2)

    def largest(output: Tensor, reference: Tensor) -> Tensor:
        return (output - reference).abs().amax()

    set_bits(model, 2)
    with torch.no_grad():
        far = float((model(x) - net(x)).abs().amax())
    assert measured(model, [x], net, plan, distance=largest) == pytest.approx(far)
    assert measured(model, [x], net, plan, distance=largest, output=lambda y: y[:, :1]) <= far
    pair = nn.Sequential(net)
    pair.forward = lambda x: {"logits": net(x)}  # type: ignore[method-assign]
    found = OutputDistance(model, [x], [pair(x)["logits"].detach()])
    with torch.no_grad():
        assert found(get_bits(model)) == pytest.approx(kl_divergence(model(x), net(x)))


@pytest.mark.parametrize("value", ["far", None, torch.zeros(2), math.nan, math.inf, [1.0]], ids=repr)
def test_a_distance_that_is_no_number_is_refused(model: nn.Module, net: nn.Module, value: Any) -> None:
    with pytest.raises(ConfigError, match="the distance returned"):
        measured(model, [torch.randn(2, 5)], net, BitPlan(default=4), distance=lambda a, b: value)


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (lambda y: y[:, :1], r"shape \(2, 1\).*\(samples, classes\).*of your own"),
        (lambda y: y[:, :, None], r"shape \(2, 3, 1\).*along which axis.*output=lambda"),
        (lambda y: y[0], r"shape \(3,\)"),
        (lambda y: {"logits": y}, r"is a dict;.*output='logits'"),
    ],
)
def test_outputs_that_are_no_logits_are_refused(model: nn.Module, net: nn.Module, output: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        measured(model, [torch.randn(2, 5)], net, BitPlan(default=4), output=output)


def test_bad_input_is_named(model: nn.Module, net: nn.Module) -> None:
    x, plan = torch.randn(2, 5), BitPlan(default=4)
    cases: list[tuple[Any, Any, dict[str, Any], type[BitdialError], str]] = [
        ([], net, {}, ConfigError, "there is no batch to measure on"),
        ([x[:0]], net, {}, ConfigError, "batch 1 is empty"),
        (["text"], net, {}, ConfigError, "batch 1 has no tensor of samples, but 'str'"),
        ([(x, torch.zeros(2))], net, {}, ConfigError, "leave out the targets"),
        ([x], model, {}, ConfigError, "reference is the model itself"),
        ([x], net(x), {}, ConfigError, "reference is a Tensor"),
        ([x], 3, {}, ConfigError, "reference is a int"),
        ([x], [net(x), net(x)], {}, ConfigError, "reference has 2 outputs, and there are 1 batches"),
        ([x], [net(x)[:1]], {}, ConfigError, r"the shape \(2, 3\), the reference's \(1, 3\)"),
        ([x], net, {"distance": 3}, ConfigError, "distance=3 must be a function"),
        ([x * math.nan], [net(x)], {}, QuantizationError, "the model's output on batch 1 at BitPlan.* holds NaN"),
        ([x], [net(x) * math.inf], {}, QuantizationError, "the reference's output on batch 1 holds NaN"),
    ]
    for batches, reference, settings, error, words in cases:
        with pytest.raises(error, match=words):
            measured(model, batches, reference, plan, **settings)


def test_relative_errors_of_several_tensors() -> None:
    wanted = [torch.tensor([3.0, 4.0]), torch.tensor([[2.0]])]
    assert relative_error([torch.tensor([3.0, 4.0]), torch.tensor([[3.0]])], wanted) == pytest.approx(0.125)
    assert relative_error(wanted[0] + 1, wanted[0]) == pytest.approx(2 / 25)
    for odd in ([wanted[0]], [wanted[0], wanted[0]], []):
        with pytest.raises(ConfigError, match="LayerOutputs"):
            relative_error(odd, wanted)


def test_a_detector_is_compared_by_what_its_predictors_put_out() -> None:
    torch.manual_seed(0)
    plain = build_model("tiny_detector", width=4, masks=False).eval()
    images = [torch.rand(3, 32, 32), torch.rand(3, 20, 31)]
    model = prepare(plain, QuantConfig(bit_choices=(8, 2), start="3std"), [images])
    with evaluating(model):
        output = LayerOutputs(["head.classes", "head.offsets"])
        measure = OutputDistance(model, [images], plain, distance=relative_error, output=output)
        assert measure.samples == 2
        assert measure(BitPlan(default=8)) < 0.1 * measure(BitPlan(default=2))
        for own in (relative_error, kl_divergence):
            with pytest.raises(ConfigError, match="output=LayerOutputs"):
                OutputDistance(model, [images], plain, distance=own)
