"""prepare: what it swaps, what it leaves, where scales start, and which norm follows which layer."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from bitdial.dial.dial import get_bits, set_bits
from bitdial.dial.plan import BitPlan
from bitdial.errors import ConfigError, QuantizationError
from bitdial.models import build_model
from bitdial.nn import QuantConv2d, QuantLayer, QuantLinear, SwitchableBatchNorm
from bitdial.prepare.config import QuantConfig, Rule
from bitdial.prepare.initial_scales import activation_start, weight_scales
from bitdial.prepare.prepare import prepare

BITS = (8, 6, 4, 2)
LEARNED = ("double_rounding", "nested", "nested+8", "centred", "truncate", "lsq")
QUICK = QuantConfig(start="3std")


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def quantised(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, QuantLayer)]


def leaders(model: nn.Module) -> dict[str, str]:
    named = model.named_modules()
    return {name: m.follows for name, m in named if isinstance(m, SwitchableBatchNorm)}


class Net(nn.Module):
    """Runs stem, a, b, c, head; registers them in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.c = nn.Conv2d(4, 4, 1)
        self.b = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.a = nn.Conv2d(4, 4, 3, padding=1)
        self.stem = nn.Conv2d(2, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        x = torch.relu(self.norm(self.a(x)))
        x = self.c(self.b(x))
        return self.head(x.mean(dim=(2, 3)))


IMAGES = randn(4, 2, 8, 8)


class Lines(nn.Module):
    """A chain of linear layers called i, a, b, o; `forward` may be given."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor] | None = None, width: int = 6) -> None:
        super().__init__()
        self.i = nn.Linear(width, width)
        self.a = nn.Linear(width, width)
        self.b = nn.Linear(width, width)
        self.o = nn.Linear(width, width)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        if self.run is not None:
            return self.run(self, x)
        return self.o(torch.relu(self.b(torch.relu(self.a(torch.relu(self.i(x)))))))


ROWS = randn(8, 6, seed=1)


# --- the original, and which layers are swapped -------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
def test_the_original_is_left_as_it_is(training: bool) -> None:
    model = Net().train(training)
    model.b.eval()
    before, types = copy.deepcopy(model.state_dict()), [type(m) for m in model.modules()]
    modes = [m.training for m in model.modules()]
    random_state = torch.get_rng_state()
    prepared = prepare(model, QUICK, IMAGES)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert [type(m) for m in model.modules()] == types
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for module in (*model.modules(), *prepared.modules()):
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert all(p.grad is None for p in (*model.parameters(), *prepared.parameters()))
    own = {p.data_ptr() for p in model.parameters()}
    assert not own & {p.data_ptr() for p in prepared.parameters()}


def test_the_original_and_the_copy_part_ways() -> None:
    model = Net().eval()
    expected = model(IMAGES)
    prepared = prepare(model, QUICK, IMAGES).train()
    for parameter in prepared.parameters():
        parameter.data.mul_(2)
    prepared(IMAGES)
    assert torch.equal(model(IMAGES), expected)


def test_the_order_of_execution_decides_the_first_and_the_last_layer() -> None:
    prepared: Any = prepare(Net(), QUICK, IMAGES)
    assert sorted(quantised(prepared)) == ["a", "b", "c"]
    assert type(prepared.stem) is nn.Conv2d
    assert type(prepared.head) is nn.Linear


def test_keep_first_last_can_be_turned_off() -> None:
    config = QuantConfig(start="3std", keep_first_last=False)
    prepared: Any = prepare(Net(), config, IMAGES)
    assert sorted(quantised(prepared)) == ["a", "b", "c", "head", "stem"]
    assert type(prepared.stem) is QuantConv2d
    assert type(prepared.head) is QuantLinear


def test_the_last_layer_is_the_one_that_runs_last() -> None:
    """b runs before and after a: its last call decides."""
    model = Lines(lambda m, x: m.b(m.a(m.b(m.i(x)))))
    assert quantised(prepare(model, QUICK, ROWS)) == ["a"]


def test_the_prepared_model_starts_at_the_highest_width() -> None:
    prepared = prepare(Net(), QuantConfig(start="3std", bit_choices=(6, 3)), IMAGES)
    assert set(get_bits(prepared).values()) == {(6, 6)}


@pytest.mark.parametrize("training", [True, False])
def test_modes_are_preserved(training: bool) -> None:
    model = Net().train(training)
    model.b.train(not training)
    prepared: Any = prepare(model, QUICK, IMAGES)
    for name, module in prepared.named_modules():
        frozen = name == "b" or name.startswith("b.")
        assert module.training == (training ^ frozen), name


def test_requires_grad_is_preserved() -> None:
    model = Net()
    model.b.weight.requires_grad_(False)
    prepared: Any = prepare(model, QUICK, IMAGES)
    assert not prepared.b.weight.requires_grad
    assert prepared.a.weight.requires_grad


# --- rules --------------------------------------------------------------------------------------


def with_rules(*rules: Rule, model: nn.Module | None = None) -> Any:
    batch = IMAGES if model is None else ROWS
    return prepare(model or Net(), QuantConfig(start="3std", rules=rules), batch)


def test_a_rule_by_pattern_excludes() -> None:
    assert sorted(quantised(with_rules(Rule(pattern="[ab]", quantize=False)))) == ["c"]


def test_a_rule_by_type_overrules_keep_first_last() -> None:
    assert sorted(quantised(with_rules(Rule(type="Linear", quantize=True)))) == ["a", "b", "c", "head"]


def test_a_rule_by_pattern_and_type_needs_both() -> None:
    prepared = with_rules(Rule(pattern="[a-h]*", type="Linear", quantize=True))
    assert sorted(quantised(prepared)) == ["a", "b", "c", "head"]
    with pytest.raises(ConfigError, match="matches no layer"):
        with_rules(Rule(pattern="stem", type="Linear", quantize=True))


def test_the_last_rule_to_speak_of_a_setting_wins() -> None:
    prepared = with_rules(
        Rule(pattern="*", quantize=False, activations="float"),
        Rule(pattern="a", quantize=True),
        Rule(pattern="b", quantize=True, activations="signed"),
    )
    assert sorted(quantised(prepared)) == ["a", "b"]
    assert prepared.a.act_quantizer is None
    assert prepared.b.act_quantizer.kind == "signed"


def test_a_rule_sets_activations_and_granularity() -> None:
    prepared = with_rules(Rule(pattern="a", activations="float"), Rule(pattern="b", per_channel=False))
    assert prepared.a.act_quantizer is None
    assert prepared.a.weight_quantizer.scale.shape == (4,)
    assert prepared.b.weight_quantizer.scale.shape == (1,)


@pytest.mark.parametrize(
    "rule",
    [Rule(pattern="layer9.*", quantize=False), Rule(type="Conv3d", quantize=False)],
    ids=str,
)
def test_a_rule_that_matches_nothing_is_named(rule: Rule) -> None:
    with pytest.raises(ConfigError, match="matches no layer") as caught:
        with_rules(rule)
    assert str(rule) in str(caught.value)
    assert "'stem'" in str(caught.value)


def test_rules_that_leave_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="no layer is left to quantise"):
        with_rules(Rule(pattern="*", quantize=False))


# --- modules and weights that are used twice ----------------------------------------------------


def test_a_module_used_twice_stays_one_module() -> None:
    model: Any = Lines(lambda m, x: m.o(m.again(torch.relu(m.b(m.a(m.i(x)))))))
    model.again = model.a
    prepared: Any = prepare(model, QUICK, ROWS)
    assert type(prepared.a) is QuantLinear
    assert prepared.again is prepared.a
    assert quantised(prepared) == ["a", "b"]
    assert prepared(ROWS).shape == (8, 6)


def test_a_module_called_twice_sees_both_inputs() -> None:
    """Calibrated on positive values alone it would be unsigned, and the second call would read 0."""
    model = Lines(lambda m, x: m.o(m.a(-m.a(m.i(x).abs()).abs())))
    prepared: Any = prepare(model, QUICK, ROWS)
    assert prepared.a.act_quantizer.kind == "signed"


def test_tied_layers_share_weight_and_scale() -> None:
    model = Lines()
    model.b.weight = model.a.weight
    prepared: Any = prepare(model, QUICK, ROWS)
    assert prepared.a.weight is prepared.b.weight
    assert prepared.a.weight_quantizer is prepared.b.weight_quantizer
    assert prepared.a.act_quantizer is not prepared.b.act_quantizer
    assert prepared.a.bias is not prepared.b.bias
    assert prepared.a.weight is not model.a.weight


@pytest.mark.parametrize("pattern", ["a", "b"])
def test_contradicting_rules_for_tied_layers_are_not_dropped_silently(pattern: str) -> None:
    """One weight has one scale: a rule for only one of its owners must count or be refused."""
    model = Lines()
    model.b.weight = model.a.weight
    try:
        prepared = with_rules(Rule(pattern=pattern, per_channel=False), model=model)
    except ConfigError:
        return
    assert getattr(prepared, pattern).weight_quantizer.scale.shape == (1,)


class Language(nn.Module):
    """An embedding tied to the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.a = nn.Linear(6, 6)
        self.b = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.b(self.a(self.embed(tokens))))


TOKENS = torch.arange(10).view(2, 5)


def test_a_head_tied_to_an_embedding_stays_float(caplog: pytest.LogCaptureFixture) -> None:
    config = QuantConfig(start="3std", keep_first_last=False)
    with caplog.at_level(logging.WARNING, "bitdial"):
        prepared: Any = prepare(Language(), config, TOKENS)
    assert quantised(prepared) == ["a", "b"]
    assert prepared.head.weight is prepared.embed.weight
    (message,) = [r.getMessage() for r in caplog.records]
    assert "'head'" in message
    assert "'embed'" in message


def test_a_rule_cannot_quantise_a_weight_that_is_used_in_float() -> None:
    config = QuantConfig(start="3std", rules=(Rule(pattern="head", quantize=True),))
    with pytest.raises(ConfigError, match=r"'head'.*'embed'.*untie"):
        prepare(Language(), config, TOKENS)


def test_a_layer_tied_to_a_float_layer_stays_float(caplog: pytest.LogCaptureFixture) -> None:
    model = Lines()
    model.a.weight = model.o.weight  # o runs last and is kept
    with caplog.at_level(logging.WARNING, "bitdial"):
        prepared = prepare(model, QUICK, ROWS)
    assert quantised(prepared) == ["b"]
    assert "'a'" in caplog.text


# --- what cannot be prepared --------------------------------------------------------------------


def test_models_without_anything_to_quantise_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"no layer to quantise.*Conv2d.*Linear"):
        prepare(nn.Sequential(nn.ReLU()), QUICK, ROWS)
    with pytest.raises(ConfigError, match=r"single layer.*wrap"):
        prepare(nn.Linear(6, 6), QUICK, ROWS)
    with pytest.raises(ConfigError, match=r"no layer is left.*keep_first_last"):
        prepare(nn.Sequential(nn.Linear(6, 6)), QUICK, ROWS)
    with pytest.raises(ConfigError, match="no layer is left"):
        prepare(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), QUICK, ROWS)


def test_one_layer_is_enough_if_it_may_be_quantised() -> None:
    config = QuantConfig(start="3std", keep_first_last=False)
    assert quantised(prepare(nn.Sequential(nn.Linear(6, 6)), config, ROWS)) == ["0"]


@pytest.mark.parametrize("config", [None, {"bit_choices": (8, 4)}, QuantConfig], ids=str)
def test_a_config_of_another_type_is_refused(config: Any) -> None:
    with pytest.raises(ConfigError, match="must be a QuantConfig, got "):
        prepare(Net(), config, randn(2, 2, 6, 6))


def test_a_prepared_model_is_not_prepared_again() -> None:
    with pytest.raises(ConfigError, match="prepared already"):
        prepare(prepare(Net(), QUICK, IMAGES), QUICK, IMAGES)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("layer", ["stem", "a", "c"])
def test_a_bad_weight_names_its_own_layer(layer: str, value: float) -> None:
    """Not the next layer, which merely receives what comes out of it."""
    model = Net()
    model.get_submodule(layer).weight.data[0, 0] = value
    with pytest.raises(QuantizationError, match=f"layer '{layer}'.*NaN or infinity"):
        prepare(model, QuantConfig(start="3std", keep_first_last=False), IMAGES)


def test_a_bad_calibration_input_names_the_layer() -> None:
    batch = IMAGES.clone()
    batch[0, 0, 0, 0] = float("nan")
    with pytest.raises(QuantizationError, match=r"layer 'stem'.*calibration input.*NaN"):
        prepare(Net(), QUICK, batch)
    model = Lines(lambda m, x: m.o(m.b(m.a(m.i(x)) / 0)))
    with pytest.raises(QuantizationError, match=r"layer 'b'.*calibration input"):
        prepare(model, QUICK, ROWS)
    with pytest.raises(QuantizationError, match=r"layer 'i'.*empty"):
        prepare(Lines(), QUICK, ROWS[:0])


def test_a_failed_calibration_leaves_the_original_alone() -> None:
    model = Net()
    with pytest.raises(QuantizationError):
        prepare(model, QUICK, IMAGES * float("nan"))
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    assert model.training


def test_a_weight_norm_parametrization_is_not_passed_over_silently(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Lines()
    nn.utils.parametrizations.weight_norm(model.a)
    said = ""
    try:
        with caplog.at_level(logging.WARNING, "bitdial"):
            prepare(model, QUICK, ROWS)
    except ConfigError as error:
        said = str(error)
    assert "'a'" in said + caplog.text


def test_an_old_weight_norm_is_refused_with_what_to_do() -> None:
    model = Lines()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        nn.utils.weight_norm(model.a)
    with pytest.raises(ConfigError, match=r"'a'.*weight norm"):
        prepare(model, QUICK, ROWS)


class MyLinear(nn.Linear):
    """What users do: a subclass with a little more."""


def test_a_subclass_of_a_layer_is_not_passed_over_silently(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model: Any = Lines()
    model.a = MyLinear(6, 6)
    with caplog.at_level(logging.WARNING, "bitdial"):
        prepared = prepare(model, QUICK, ROWS)
    assert "a" in quantised(prepared) or "'a'" in caplog.text


def test_a_layer_that_does_not_run_stays_float(caplog: pytest.LogCaptureFixture) -> None:
    model = Lines(lambda m, x: m.o(m.a(m.i(x))))
    with caplog.at_level(logging.WARNING, "bitdial"):
        assert quantised(prepare(model, QUICK, ROWS)) == ["a"]
    assert "'b' did not run" in caplog.text
    with pytest.raises(ConfigError, match=r"layer 'b'.*does not run it"):
        with_rules(Rule(pattern="b", quantize=True), model=model)
    with pytest.raises(ConfigError, match="no layer is left"):
        prepare(Lines(lambda m, x: x), QUICK, ROWS)


# --- calibration batches ------------------------------------------------------------------------


class TwoInputs(Lines):
    def forward(self, x: Tensor, shift: Tensor) -> Tensor:  # type: ignore[override]
        return self.o(self.b(self.a(self.i(x + shift))))


def test_batches_may_be_tensors_tuples_dicts_or_a_list_of_these() -> None:
    shift = torch.full((6,), 0.5)
    outputs = []
    for batch in (
        (ROWS, shift),
        {"x": ROWS, "shift": shift},
        [(ROWS, shift)],
        [{"x": ROWS[:4], "shift": shift}, (ROWS[4:], shift)],
    ):
        torch.manual_seed(3)
        outputs.append(prepare(TwoInputs(), QUICK, batch)(ROWS, shift))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])
    torch.testing.assert_close(outputs[0], outputs[3])  # the same samples in another order
    torch.manual_seed(3)
    with_list = prepare(Lines(), QUICK, [ROWS[:4], ROWS[4:]])
    torch.manual_seed(3)
    torch.testing.assert_close(with_list(ROWS), prepare(Lines(), QUICK, ROWS)(ROWS))


def test_batches_of_other_types_are_refused() -> None:
    with pytest.raises(ConfigError, match="empty"):
        prepare(Net(), QUICK, [])
    with pytest.raises(ConfigError, match="str"):
        prepare(Net(), QUICK, ["images"])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="set"):
        prepare(Net(), QUICK, {"images"})  # type: ignore[arg-type]


def test_a_layer_called_by_keyword_is_calibrated() -> None:
    model = Lines(lambda m, x: m.o(input=m.a(input=m.i(x))))
    assert quantised(prepare(model, QUICK, ROWS)) == ["a"]


def test_later_batches_count() -> None:
    """The sign of an activation may show in one of the batches only."""
    model = Lines(lambda m, x: m.o(m.a(x * m.i(x).abs().sign())))
    rows = ROWS.abs() + 0.1
    assert prepare(model, QUICK, rows).a.act_quantizer.kind == "unsigned"
    assert prepare(model, QUICK, [rows, -rows]).a.act_quantizer.kind == "signed"
    assert prepare(model, QUICK, [-rows, rows]).a.act_quantizer.kind == "signed"


def test_calibration_samples_every_column_of_an_image() -> None:
    """A million values are thinned out; a step that divides the width would see one column only,
    and at the border of an image that is not what the rest looks like."""
    model = nn.Sequential(nn.Conv2d(16, 2, 1), nn.Conv2d(2, 2, 1))
    images = rand(64, 16, 32, 32) * 7
    images[..., ::16] = 0
    config = QuantConfig(start="3std", keep_first_last=False)
    prepared: Any = prepare(model, config, images)
    scale = prepared[0].act_quantizer.scales["8"].item()
    exact = torch.quantile(images[:8].flatten(), 0.999).item() / 255
    assert scale == pytest.approx(exact, rel=0.01)


# --- kinds of activations -----------------------------------------------------------------------


def test_auto_is_unsigned_where_nothing_negative_was_seen() -> None:
    prepared: Any = prepare(Net(), QUICK, IMAGES)
    kinds = {name: getattr(prepared, name).act_quantizer.kind for name in "abc"}
    assert kinds == {"a": "unsigned", "b": "unsigned", "c": "signed"}


@pytest.mark.parametrize("kind", ["signed", "asymmetric"])
def test_a_kind_may_be_given(kind: str) -> None:
    prepared: Any = prepare(Net(), QuantConfig(activations=kind), IMAGES)
    assert prepared.c.act_quantizer.kind == kind
    zero_points = prepared.c.act_quantizer.zero_points
    assert set(zero_points) == ({"8", "6", "4", "2"} if kind == "asymmetric" else set())
    for bits in BITS:
        set_bits(prepared, bits)
        assert torch.isfinite(prepared(IMAGES)).all()


def test_unsigned_over_negative_values_warns(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "bitdial"):
        prepare(Net(), QuantConfig(activations="unsigned", start="3std"), IMAGES)
    assert "'c'" in caplog.text
    assert "'a'" not in caplog.text


def test_weight_only() -> None:
    prepared: Any = prepare(Net(), QuantConfig(activations="float", start="3std"), IMAGES)
    assert all(getattr(prepared, name).act_quantizer is None for name in "abc")
    set_bits(prepared, (4, 8))
    at8 = prepared.eval()(IMAGES)
    set_bits(prepared, (4, 2))
    assert torch.equal(prepared(IMAGES), at8)


def test_four_bit_weights_with_eight_bit_activations() -> None:
    prepared: Any = prepare(Net(), QUICK, IMAGES).eval()
    set_bits(prepared, (4, 8))
    seen = []
    prepared.b.register_forward_hook(lambda m, args, out: seen.append(args[0]))
    out = prepared(IMAGES)
    x, weight = prepared.b.quantized_input(seen[0]), prepared.b.quantized_weight()
    assert 16 < len(x.unique()) <= 256
    assert all(len(row.unique()) <= 16 for row in weight)
    set_bits(prepared, 4)
    assert not torch.equal(prepared(IMAGES), out)


# --- convolutions -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        {"groups": 2},
        {"groups": 4},
        {"padding": 1, "padding_mode": "reflect"},
        {"padding": 1, "padding_mode": "circular"},
        {"padding": "same", "dilation": 2},
        {"stride": 2, "bias": False},
    ],
    ids=str,
)
def test_every_kind_of_convolution_is_prepared(arguments: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 3, **arguments), nn.Conv2d(4, 2, 1)).eval()
    prepared: Any = prepare(model, QuantConfig(bit_choices=(8,)), IMAGES)
    assert type(prepared[1]) is QuantConv2d
    expected = model(IMAGES)
    error = (prepared(IMAGES) - expected).norm() / expected.norm()
    assert 0 < error < 0.02


# --- norms --------------------------------------------------------------------------------------


class Norms(nn.Module):
    """stem and head in float around whatever a subclass does between them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.a = nn.Linear(6, 6)
        self.b = nn.Linear(6, 6)
        self.n0 = nn.BatchNorm1d(6)
        self.n1 = nn.BatchNorm1d(6)
        self.n2 = nn.BatchNorm1d(12)
        self.head = nn.Linear(6, 2)
        self.wide = nn.Linear(12, 2)


CASES: dict[str, tuple[Callable[[Any, Tensor], Tensor], dict[str, str]]] = {
    "direct": (lambda m, x: m.head(m.n0(m.a(m.stem(x)))), {"n0": "a"}),
    "through an activation and a reshape": (
        lambda m, x: m.head(m.n0(torch.relu(m.a(m.stem(x))).view(-1, 6) * 2)),
        {"n0": "a"},
    ),
    "two norms on one layer": (
        lambda m, x: m.head(m.n1(torch.relu(m.n0(m.a(m.stem(x)))))),
        {"n0": "a", "n1": "a"},
    ),
    "residual": (
        lambda m, x: (lambda y: m.head(m.n0(y + m.b(y))))(m.a(m.stem(x))),
        {"n0": "b"},
    ),
    "residual, in place": (
        lambda m, x: (lambda y: m.head(m.n0(y.add_(m.b(y)))))(m.a(m.stem(x))),
        {"n0": "b"},
    ),
    "concatenation": (
        lambda m, x: (lambda y: m.wide(m.n2(torch.cat([m.b(y), m.a(y)], dim=1))))(m.stem(x)),
        {"n2": "a"},
    ),
    "after a float stem": (
        lambda m, x: m.head(m.b(m.a(torch.relu(m.n0(m.stem(x)))))),
        {"n0": "a"},
    ),
    "two after a float stem": (
        lambda m, x: m.head(m.a(m.n1(torch.relu(m.n0(m.stem(x)))))),
        {"n0": "a", "n1": "a"},
    ),
    "stem feeding two": (
        lambda m, x: (lambda y: m.head(m.b(y) + m.a(y)))(m.n0(m.stem(x))),
        {"n0": "b"},
    ),
    "of the input": (lambda m, x: m.head(m.a(m.stem(m.n0(x)))), {"n0": "a"}),
    "by keyword": (lambda m, x: m.head(m.n0(input=m.a(m.stem(x)))), {"n0": "a"}),
    "unconnected": (lambda m, x: m.head(m.a(m.stem(x))) + 0 * m.n0(x).sum(), {}),
}


@pytest.mark.parametrize("case", CASES)
def test_each_norm_follows_the_layer_that_feeds_it(case: str) -> None:
    run, expected = CASES[case]

    class Model(Norms):
        def forward(self, x: Tensor) -> Tensor:
            return run(self, x)

    prepared: Any = prepare(Model(), QUICK, ROWS)
    assert leaders(prepared) == expected
    layers = quantised(prepared)
    plan = BitPlan(dict(zip(layers, (4, 2), strict=False)))
    set_bits(prepared, plan)
    for norm, leader in expected.items():
        assert prepared.get_submodule(norm).bits == plan[leader][0]


@pytest.mark.parametrize("suffix", range(8))
def test_the_last_of_several_is_found_after_a_layer_that_ran_twice(suffix: int) -> None:
    """first, second, first again, third: a concatenation of the last two follows the third.

    Several names, because a tie would be broken by the hash of the name.
    """
    first, second, third = (f"{n}{suffix}" for n in ("first", "second", "third"))

    class Model(Norms):
        def __init__(self) -> None:
            super().__init__()
            for name in (first, second, third):
                self.add_module(name, nn.Linear(6, 6))

        def forward(self, x: Tensor) -> Tensor:
            layers: Any = self._modules
            x = self.stem(x)
            again = layers[first](layers[second](layers[first](x)))
            return self.wide(self.n2(torch.cat([again, layers[third](x)], dim=1)))

    assert leaders(prepare(Model(), QUICK, ROWS)) == {"n2": third}


def test_norms_behind_a_custom_autograd_function() -> None:
    class Swish(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * torch.sigmoid(x)

    class Model(Norms):
        def forward(self, x: Tensor) -> Tensor:
            x = Swish.apply(self.n0(Swish.apply(self.stem(x))))
            return self.head(self.n1(Swish.apply(self.a(x))))

    assert leaders(prepare(Model(), QUICK, ROWS)) == {"n0": "a", "n1": "a"}


def test_norms_may_stay_as_they_are() -> None:
    config = QuantConfig(start="3std", switch_norms=False)
    prepared: Any = prepare(Net(), config, IMAGES)
    assert type(prepared.norm) is nn.BatchNorm2d
    set_bits(prepared, 4)


def test_a_norm_has_a_set_for_each_width_and_starts_as_the_original() -> None:
    model = Net()
    model(IMAGES * 3)  # statistics of its own
    prepared: Any = prepare(model, QUICK, IMAGES)
    assert set(prepared.norm.sets) == {"8", "6", "4", "2"}
    for one in prepared.norm.sets.values():
        for name, value in model.norm.state_dict().items():
            assert torch.equal(one.state_dict()[name], value)


# --- gradients and closeness --------------------------------------------------------------------


@pytest.mark.parametrize("activations", ["auto", "asymmetric"])
@pytest.mark.parametrize("scheme", ["double_rounding", "nested", "truncate", "lsq", "adabits"])
def test_a_pass_at_four_bits_gives_gradients_to_four_bits_alone(scheme: str, activations: str) -> None:
    config = QuantConfig(start="3std", scheme=scheme, activations=activations)
    prepared = prepare(Net(), config, IMAGES).train()
    set_bits(prepared, 4)
    prepared(IMAGES).square().sum().backward()
    per_width = 0
    for name, parameter in prepared.named_parameters():
        parts = name.split(".")
        widths = [p for p in parts if p in {"8", "6", "4", "2"}]
        assert (parameter.grad is not None) == (not widths or widths == ["4"]), name
        if parameter.grad is not None:
            assert bool(torch.isfinite(parameter.grad).all()), name
        per_width += bool(widths)
    # 3 activation scales (and zero-points), a norm's weight and bias, 3 weight scales under lsq
    expected = 3 * (2 if activations == "asymmetric" else 1) + 2 + (3 if scheme == "lsq" else 0)
    assert per_width == 4 * expected


def test_mixed_bits_give_gradients_to_what_was_used() -> None:
    prepared = prepare(Net(), QUICK, IMAGES).train()
    set_bits(prepared, BitPlan({"a": (4, 8), "b": (2, 6), "c": 8}))
    prepared(IMAGES).square().sum().backward()
    received = {n for n, p in prepared.named_parameters() if p.grad is not None}
    assert {n for n in received if "act_quantizer" in n or "sets" in n} == {
        "a.act_quantizer.scales.8",
        "b.act_quantizer.scales.6",
        "c.act_quantizer.scales.8",
        "norm.sets.4.weight",
        "norm.sets.4.bias",
    }


def settled(name: str, batch: Tensor, **arguments: Any) -> nn.Module:
    """A model whose batch norms have the statistics of `batch`."""
    model = build_model(name, **arguments)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
    with torch.no_grad():
        model(batch)
    return model.eval()


def relative_error(prepared: nn.Module, model: nn.Module, batch: Tensor) -> float:
    with torch.no_grad():
        expected = model(batch)
        return float((prepared(batch) - expected).norm() / expected.norm())


SMALL: dict[str, tuple[str, dict[str, int], Tensor]] = {
    "convolutions": ("cifar_resnet", {"blocks": 2, "width": 8}, randn(8, 3, 16, 16)),
    "transformer": ("tiny_transformer", {}, torch.arange(64).view(4, 16)),
}


@pytest.mark.parametrize("scheme", LEARNED)
@pytest.mark.parametrize("case", SMALL)
def test_eight_bits_are_close_to_float(case: str, scheme: str) -> None:
    name, arguments, batch = SMALL[case]
    model = settled(name, batch, **arguments)
    prepared = prepare(model, QuantConfig(bit_choices=(8,), scheme=scheme), batch)
    assert relative_error(prepared, model, batch) < 0.04


@pytest.mark.parametrize("start", ["mse", "3std"])
@pytest.mark.parametrize("case", SMALL)
def test_eight_bits_stay_close_to_float_beside_lower_widths(case: str, start: str) -> None:
    """The scale is shared: what 2 bits want must not cost 8 bits their closeness."""
    name, arguments, batch = SMALL[case]
    model = settled(name, batch, **arguments)
    prepared = prepare(model, QuantConfig(start=start), batch)
    errors = {}
    for bits in BITS:
        set_bits(prepared, bits)
        errors[bits] = relative_error(prepared, model, batch)
    assert errors[8] < errors[4] < 1
    assert errors[8] < 0.25


@pytest.mark.parametrize("scheme", LEARNED)
@pytest.mark.parametrize("start", ["mse", "3std", "lsq"])
def test_no_layer_starts_dead(start: str, scheme: str) -> None:
    """At 2 bits a layer whose codes are all the same computes nothing and learns little."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    for layer in model:
        nn.init.normal_(layer.weight, std=0.1)
    prepared: Any = prepare(model, QuantConfig(start=start, scheme=scheme), randn(16, 64))
    for bits in BITS:
        codes = prepared[1].weight_quantizer.codes(prepared[1].weight, bits)
        used = np.mean([len(row.unique()) for row in codes])
        assert used > 1.9, bits


# --- other models -----------------------------------------------------------------


def test_an_encoder_layer_quantises_without_gradients_too() -> None:
    """In eval mode without gradients torch's own layer reads the weights and skips its linears."""

    class Encoder(Lines):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.o(self.layer(self.i(x)))

    sequences = randn(3, 5, 6)
    model = Encoder().eval()
    try:
        prepared = prepare(model, QUICK, sequences)
    except ConfigError:
        return  # refusing such a model would do as well
    set_bits(prepared, 2)
    with_gradients = prepared(sequences).detach()
    with torch.no_grad():
        without, unquantised = prepared(sequences), model(sequences)
    assert not torch.allclose(with_gradients, unquantised, atol=1e-3)
    torch.testing.assert_close(without, with_gradients, rtol=1e-4, atol=1e-5)


def test_an_encoder_takes_a_padding_mask_without_gradients_too() -> None:
    """There torch's own encoder makes nested tensors for its fast path, which no quantizer takes."""

    class Encoder(Lines):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.o(self.encoder(self.i(x), src_key_padding_mask=mask))

    sequences, mask = randn(3, 5, 6), torch.zeros(3, 5, dtype=torch.bool)
    mask[1, 3:] = True
    prepared = prepare(Encoder(), QUICK, (sequences, mask)).eval()
    set_bits(prepared, 2)
    with_gradients = prepared(sequences, mask).detach()
    with torch.no_grad():
        torch.testing.assert_close(prepared(sequences, mask), with_gradients, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "arguments", "layers", "first"),
    [
        ("resnet18", {"num_classes": 5}, 19, "layer1.0.conv1"),
        ("resnet50", {"num_classes": 5}, 52, "layer1.0.conv1"),
        ("mobilenet_v2", {"num_classes": 5, "width_mult": 0.35}, 51, "features.1.conv.0.0"),
    ],
)
def test_ready_made_networks(name: str, arguments: dict[str, Any], layers: int, first: str) -> None:
    batch = randn(1, 3, 32, 32)
    model = build_model(name, **arguments).eval()
    prepared = prepare(model, QuantConfig(bit_choices=(8, 4), start="lsq"), batch)
    assert len(quantised(prepared)) == layers
    found = leaders(prepared)
    norms = [n for n, m in model.named_modules() if isinstance(m, nn.BatchNorm2d)]
    assert list(found) == norms
    assert found[norms[0]] == first  # the stem is float: its norm follows the layer it feeds
    for norm in norms[1:]:
        parent, _, last = norm.rpartition(".")
        # bn2 follows conv2; in a Sequential, the convolution just before
        beside = f"conv{last[2:]}" if last.startswith("bn") else str(int(last) - 1)
        assert found[norm] == f"{parent}.{beside}"
    set_bits(prepared, BitPlan({first: (4, 8)}, default=8))
    with torch.no_grad():
        assert torch.isfinite(prepared(batch)).all()


def test_the_ready_made_transformer() -> None:
    tokens = torch.arange(32).view(2, 16)
    prepared = prepare(build_model("tiny_transformer"), QUICK, tokens)
    names = quantised(prepared)
    assert len(names) == 12
    assert "blocks.0.attention.q" in names  # the first linear to run, but behind the embedding
    assert "head" not in names
    set_bits(prepared, 4)
    assert prepared(tokens).shape == (2, 2)


# --- starting scales ----------------------------------------------------------------------------


def squared_error(rows: np.ndarray, scale: np.ndarray, high: int, low: int, scheme: str) -> Any:
    """|W - W_low|^2 by the formulas, per channel, in float64."""
    s, step, phase = scale[:, None], 2 ** (high - low), int(scheme.partition("+")[2] or 0)
    code = np.floor(rows / s) if scheme == "centred" else np.rint(rows / s)
    code = (np.clip(code, -(2 ** (high - 1)), 2 ** (high - 1) - 1 - phase) + phase) / step
    code = np.rint(code) if scheme == "double_rounding" else np.floor(code)
    code = np.clip(code, -(2 ** (low - 1)), 2 ** (low - 1) - 1)
    below = scheme.startswith("nested") and high != low
    middle = step / 2 if scheme == "centred" or below else 0.0
    return ((rows - (code * step + middle - phase) * s) ** 2).sum(axis=1)


def starts_of(weight: Tensor, start: str, scheme: str, channels: int) -> dict[int, Tensor]:
    config = QuantConfig(bit_choices=BITS, scheme=scheme, start=start)
    return weight_scales(weight, (channels,), name="x", config=config)


def summed_error(weight: Tensor, start: str, scheme: str) -> np.ndarray:
    scales = starts_of(weight, start, scheme, weight.shape[0])
    assert set(scales) == (set(BITS) if scheme == "lsq" else {8})
    rows = weight.double().flatten(1).numpy()
    total = np.zeros(len(rows))
    for bits in BITS:
        high = bits if scheme == "lsq" else 8
        total += squared_error(rows, scales[high].double().numpy(), high, bits, scheme)
    return total


WEIGHTS: dict[str, Tensor] = {
    "normal": randn(32, 16, 3, 3),
    "uniform": rand(32, 64) - 0.5,
    "heavy tails": randn(32, 256) * randn(32, 256, seed=1).abs() ** 3,
    "one sign": rand(32, 64),
    "depthwise": randn(32, 1, 3, 3),
    "sparse": randn(32, 288) * (rand(32, 288) < 0.05),
    "one weight a channel": randn(32, 1, 1, 1),
}


@pytest.mark.parametrize("other", ["3std", "lsq"])
@pytest.mark.parametrize("scheme", LEARNED)
@pytest.mark.parametrize("case", WEIGHTS)
def test_mse_start_has_the_least_error(case: str, scheme: str, other: str) -> None:
    best = summed_error(WEIGHTS[case], "mse", scheme)
    against = summed_error(WEIGHTS[case], other, scheme)
    assert best.sum() <= against.sum() * 1.001


@pytest.mark.parametrize("scheme", LEARNED)
@pytest.mark.parametrize("case", WEIGHTS)
def test_mse_start_has_the_least_error_in_every_channel(case: str, scheme: str) -> None:
    """Up to what a grid can miss: 5 % of the error, or a thousandth of the weights' energy."""
    best = summed_error(WEIGHTS[case], "mse", scheme)
    energy = WEIGHTS[case].double().square().flatten(1).sum(dim=1).numpy()
    for other in ("3std", "lsq"):
        against = summed_error(WEIGHTS[case], other, scheme)
        worse = best > against * 1.05 + 1e-3 * energy
        assert not worse.any(), f"{worse.sum()} of {len(worse)} channels are worse than {other}"


@pytest.mark.parametrize("channels", [1, 32])
def test_3std_start_of_weights(channels: int) -> None:
    weight = WEIGHTS["normal"] + 0.3
    rows = weight.double().numpy().reshape(channels, -1)
    mean, deviation = rows.mean(axis=1), rows.std(axis=1)
    reach = np.maximum(np.abs(mean - 3 * deviation), np.abs(mean + 3 * deviation))
    got = starts_of(weight, "3std", "double_rounding", channels)
    np.testing.assert_allclose(got[8].numpy(), reach / 128, rtol=1e-5)
    for bits, scale in starts_of(weight, "3std", "lsq", channels).items():
        np.testing.assert_allclose(scale.numpy(), reach / 2 ** (bits - 1), rtol=1e-5)


@pytest.mark.parametrize("channels", [1, 32])
def test_lsq_start_of_weights(channels: int) -> None:
    weight = WEIGHTS["normal"]
    size = 2 * np.abs(weight.double().numpy().reshape(channels, -1)).mean(axis=1)
    for bits, scale in starts_of(weight, "lsq", "lsq", channels).items():
        np.testing.assert_allclose(scale.numpy(), size / np.sqrt(2 ** (bits - 1) - 1), rtol=1e-5)


@pytest.mark.parametrize("scheme", ["adabits", "dorefa"])
def test_schemes_with_derived_scales_start_with_none(scheme: str) -> None:
    assert starts_of(WEIGHTS["normal"], "mse", scheme, 32) == {}


@pytest.mark.parametrize("start", ["mse", "3std", "lsq"])
@pytest.mark.parametrize("scheme", ["double_rounding", "lsq"])
def test_a_channel_of_zeros_gets_a_usable_scale(start: str, scheme: str) -> None:
    weight = randn(3, 20)
    weight[1] = 0
    for values in (weight, torch.zeros(3, 20)):
        for scale in starts_of(values, start, scheme, 3).values():
            assert scale.shape == (3,)
            assert bool((scale > 1e-4).all())
            assert bool(torch.isfinite(scale).all())


def act_start(samples: Tensor, kind: str, start: str) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    return activation_start(samples, name="x", bit_choices=BITS, kind=kind, start=start)


@pytest.mark.parametrize("kind", ["unsigned", "signed"])
def test_3std_start_of_activations(kind: str) -> None:
    samples = randn(5000).abs() if kind == "unsigned" else randn(5000)
    kept = np.quantile(np.abs(samples.double().numpy()), 0.999)
    scales, zero_points = act_start(samples, kind, "3std")
    assert zero_points == {}
    for bits in BITS:
        levels = 2**bits - 1 if kind == "unsigned" else 2 ** (bits - 1)
        assert scales[bits].shape == (1,)
        assert scales[bits].item() == pytest.approx(kept / levels, rel=1e-4)


@pytest.mark.parametrize("kind", ["unsigned", "signed"])
def test_lsq_start_of_activations(kind: str) -> None:
    """2 mean|x| / sqrt(Qp), but never a range beyond the largest value seen."""
    samples = randn(5000).abs() if kind == "unsigned" else randn(5000)
    scales, _ = act_start(samples, kind, "lsq")
    for bits in BITS:
        top, levels = (2**bits - 1,) * 2 if kind == "unsigned" else (2 ** (bits - 1) - 1, 2 ** (bits - 1))
        formula = 2 * samples.abs().mean().item() / top**0.5
        expected = min(formula, samples.abs().max().item() / levels)
        assert scales[bits].item() == pytest.approx(expected, rel=1e-4)


def act_error(samples: Tensor, scale: float, zero: int, bits: int, kind: str) -> float:
    least, most = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if kind == "signed" else (0, 2**bits - 1)
    x = samples.double().numpy()
    code = np.clip(np.rint(x / scale) + zero, least, most)
    return float(((x - (code - zero) * scale) ** 2).sum())


@pytest.mark.parametrize(
    ("kind", "samples"),
    [
        ("unsigned", randn(4000).relu()),
        ("unsigned", randn(4000).relu() ** 4),
        ("signed", randn(4000)),
        ("signed", functional.gelu(randn(4000) * 2)),
        ("asymmetric", functional.gelu(randn(4000) * 2)),
        ("asymmetric", randn(4000) - 4),
        ("asymmetric", rand(4000) + 3),
    ],
)
def test_mse_start_of_activations_has_the_least_error(kind: str, samples: Tensor) -> None:
    errors = {}
    for start in ("mse", "3std", "lsq"):
        scales, zeros = act_start(samples, kind, start)
        assert set(zeros) == (set(BITS) if kind == "asymmetric" else set())
        errors[start] = {b: act_error(samples, scales[b].item(), int(zeros[b]) if zeros else 0, b, kind) for b in BITS}
    for bits in BITS:
        least = min(errors["3std"][bits], errors["lsq"][bits])
        assert errors["mse"][bits] <= least * 1.02, bits  # it searches a grid


def test_zero_points_are_codes_and_the_range_is_covered() -> None:
    samples = torch.cat([torch.linspace(-1, 3, 4001), torch.zeros(4000)])
    scales, zeros = act_start(samples, "asymmetric", "mse")
    for bits in (8, 6):
        assert zeros[bits].item() == int(zeros[bits])
        assert 0 <= zeros[bits].item() <= 2**bits - 1
        # a quarter of the range lies below zero
        assert zeros[bits].item() == pytest.approx((2**bits - 1) / 4, abs=1.5)
        assert scales[bits].item() == pytest.approx(4 / (2**bits - 1), rel=0.05)


@pytest.mark.parametrize("start", ["mse", "3std", "lsq"])
@pytest.mark.parametrize("kind", ["unsigned", "signed", "asymmetric"])
def test_an_input_of_zeros_starts_at_a_range_of_one(kind: str, start: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "bitdial"):
        scales, zeros = act_start(torch.zeros(100), kind, start)
    assert "'x'" in caplog.text
    for bits in BITS:
        levels = 2 ** (bits - 1) if kind == "signed" else 2**bits - 1
        assert 0.5 / levels < scales[bits].item() < 1.2 / (levels - 1)
        assert all(z.item() == 0 for z in zeros.values())


@pytest.mark.parametrize("start", ["mse", "3std", "lsq"])
@pytest.mark.parametrize("kind", ["unsigned", "signed", "asymmetric"])
def test_sparse_inputs_get_positive_scales(kind: str, start: str) -> None:
    """Of ten thousand values one is not zero: the 99.9th percentile is 0."""
    samples = torch.zeros(10_000)
    samples[17] = 2.0
    scales, _ = act_start(samples, kind, start)
    assert all(torch.isfinite(s).all() and s.item() > 0 for s in scales.values())


def test_many_calibration_batches_do_not_exceed_a_limit_of_torch() -> None:
    """torch.quantile takes 16 million values; 257 batches of 65,536 samples are more."""
    samples = torch.ones(257 << 16)
    scales, _ = activation_start(samples, name="x", bit_choices=(8,), kind="unsigned", start="3std")
    assert scales[8].item() == pytest.approx(1 / 255, rel=1e-4)
