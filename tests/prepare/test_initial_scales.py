"""Starting scales of groups, and the start that clips nothing."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bitdial import QuantConfig, Rule, describe, prepare
from bitdial import functional as bf
from bitdial.errors import ConfigError, QuantizationError
from bitdial.prepare import activation_ranges, initial_scales
from bitdial.prepare.activation_ranges import observe_inputs
from bitdial.prepare.config import STARTS
from bitdial.prepare.initial_scales import activation_start, clip_ratios, weight_scales
from bitdial.prepare.report import ModelReport

LEARNED = ("double_rounding", "nested", "nested+8", "centred", "truncate")
BITS = (8, 6, 4, 2)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def start_of(weight: Tensor, shape: tuple[int, ...], **settings: Any) -> Tensor:
    config = QuantConfig(**{"bit_choices": BITS, **settings})
    return weight_scales(weight, shape, name="x", config=config)[config.bit_choices[0]]


def within_half_a_step(values: Tensor, weight: Tensor, scale: Tensor) -> bool:
    """Up to the rounding of the values themselves."""
    step = bf.values_by_scale(torch.ones_like(weight), scale)
    return bool(((values - weight).abs() <= step / 2 + weight.abs() * 2**-22).all())


def test_groups_start_as_shorter_rows_do() -> None:
    weight = randn(4, 24, 3)
    for scheme in LEARNED:
        for start in STARTS:
            grouped = start_of(weight, (4, 6), scheme=scheme, start=start, group_scales="float")
            rows = start_of(weight.reshape(24, 12), (24,), scheme=scheme, start=start)
            assert torch.equal(grouped, rows.reshape(4, 6)), (scheme, start)


@pytest.mark.parametrize("high", [8, 4, 2])
def test_the_full_range_clips_nothing_at_the_highest_width_and_wastes_nothing(high: int) -> None:
    """Every weight is within half a step of its value, and the largest has the last code that is not clipped."""
    weight = randn(5, 16) * torch.tensor([1e-3, 1.0, 50.0, 1.0, 1e-6])[:, None]
    weight[3] = -weight[3].abs()
    for scheme in ("double_rounding", "nested", "centred", "truncate", "lsq"):
        for shape in ((1,), (5,), (5, 4)):
            if shape == (5, 4) and scheme == "lsq":
                continue
            choices = {"bit_choices": (high,), "scheme": scheme, "start": "max", "group_scales": "float"}
            scale = start_of(weight, shape, **choices)
            assert scale.shape == shape
            values = bf.fake_quantize(weight, scale, high=high, low=high, scheme=scheme)
            assert within_half_a_step(values, weight, scale), (scheme, shape)
            rows = weight.abs().reshape(scale.numel(), -1).amax(dim=1)
            last = 2 ** (high - 1) if scheme == "centred" else 2 ** (high - 1) - 1
            torch.testing.assert_close(scale.reshape(-1), rows / last)


def test_a_phase_leaves_fewer_codes_above_zero() -> None:
    weight = randn(3, 32)
    scale = start_of(weight, (3,), scheme="nested+8", start="max")
    torch.testing.assert_close(scale, weight.abs().amax(dim=1) / 119)
    assert within_half_a_step(bf.fake_quantize(weight, scale, high=8, low=8, scheme="nested+8"), weight, scale)


def test_the_full_range_of_two_levels_is_above_that_of_each_group() -> None:
    weight = randn(6, 64) * torch.linspace(0.05, 1, 64)
    for scheme in LEARNED:
        floats = start_of(weight, (6, 8), scheme=scheme, start="max", group_scales="float")
        scale = start_of(weight, (6, 8), scheme=scheme, start="max")
        assert torch.equal(bf.two_level(scale), scale)  # what is used is what was started from
        assert (scale >= floats * (1 - 1e-6)).all()
        values = bf.fake_quantize(weight, scale, high=8, low=8, scheme=scheme)
        assert within_half_a_step(values, weight, scale), scheme


def test_a_group_of_zeros_takes_the_range_of_its_channel() -> None:
    """Not that of the tensor: a row's scale is that of its largest group, and the others would be crushed."""
    weight = randn(3, 12)
    weight[0, 4:8] = 0
    weight[1] = 0
    weight[2] *= 1000
    for start in STARTS:
        scale = start_of(weight, (3, 3), start=start)
        used = bf.two_level(scale)
        assert (used > 0).all()
        assert scale[0, 1] <= 30 * scale[0, [0, 2]].max()
        codes = bf.quantize(weight, used, bits=8)
        assert not codes[0, 4:8].any()
        assert not codes[1].any()
        assert codes[0, :4].any()


@pytest.mark.parametrize("kind", ["unsigned", "signed", "asymmetric"])
def test_the_full_range_of_activations(kind: str) -> None:
    samples = torch.tensor([-0.7, 0.1, 2.5]) if kind != "unsigned" else torch.tensor([0.0, 0.1, 2.5])
    scales, zero_points = activation_start(samples, name="x", bit_choices=BITS, kind=kind, start="max")
    for bits in BITS:
        reach = {"unsigned": 2.5 / (2**bits - 1), "signed": 2.5 / (2 ** (bits - 1) - 1)}
        expected = reach.get(kind, 3.2 / (2**bits - 1))
        assert float(scales[bits]) == pytest.approx(expected)
        zero_point = zero_points.get(bits)
        values = bf.fake_quantize_activation(samples, scales[bits], zero_point, bits=bits, kind=kind)
        step = float(scales[bits])
        assert ((values - samples).abs() <= step * (1.0 if kind == "asymmetric" else 0.5) * (1 + 1e-5)).all(), bits


def test_the_largest_activation_seen_counts_not_a_sample_of_them() -> None:
    """More values than are kept: the largest is at a place that is left out."""
    x = torch.zeros(3, 40_000)
    x[:, 0] = 1.0
    model = nn.Sequential(nn.Linear(40_000, 1), nn.Linear(1, 1)).eval()
    for place in (1, 2, 5):
        x[1, place], before = 64.0, x[1, place].clone()
        config = QuantConfig(start="max", keep_first_last=False, activations="unsigned", bit_choices=(8,))
        prepared: Any = prepare(model, config, x)
        assert prepared[0].act_quantizer.scales["8"].item() == pytest.approx(64 / 255)
        x[1, place] = before
    with torch.no_grad():
        double: Any = prepare(model.double(), config, x.double())
    assert double[0].act_quantizer.scales["8"].dtype == torch.float32


@pytest.mark.parametrize("start", ["mse", "balanced"])
def test_however_many_candidates_are_tried_at_once(start: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, config = randn(6, 40), QuantConfig(bit_choices=BITS, start=start)
    found = []
    for at_once in (1, 700, 1 << 20):
        monkeypatch.setattr(initial_scales, "AT_ONCE", at_once)
        squares = randn(40, seed=1).square()
        scales = [
            weight_scales(weight, (6,), name="x", config=config)[8],
            weight_scales(weight, (6, 5), name="x", config=config, input_squares=squares)[8].flatten(),
            *activation_start(weight, name="x", bit_choices=BITS, kind="asymmetric", start=start)[0].values(),
            *clip_ratios(weight, bit_choices=BITS, start=start).values(),
        ]
        found.append(torch.cat(scales))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_values_that_are_not_finite_are_named_even_if_the_model_fails_on_them() -> None:
    class Strict(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.second(self.first(x))
            if bool(x.isnan().any()):
                raise ValueError("no")
            return x

    x = randn(8, 4)
    x[3, 1] = float("inf")
    with pytest.raises(QuantizationError, match="'first': its calibration input holds NaN or infinity"):
        observe_inputs(model := Strict(), dict(model.named_children()), [randn(8, 4), x])


def test_the_starts_of_channels_are_what_they_were() -> None:
    """By hand for two of them."""
    weight = randn(3, 40)
    rows = weight.double().numpy()
    three = np.maximum(abs(rows.mean(1) - 3 * rows.std(1)), abs(rows.mean(1) + 3 * rows.std(1))) / 128
    np.testing.assert_allclose(start_of(weight, (3,), start="3std").numpy(), three, rtol=1e-5)
    np.testing.assert_allclose(start_of(weight, (3,), start="max").numpy(), abs(rows).max(1) / 127, rtol=1e-6)


# --- balanced -------------------------------------------------------------------------------------


def errors_of(weight: Tensor, scale: Tensor, scheme: str, widths: tuple[int, ...] = BITS) -> Tensor:
    """The squared errors (widths, rows), float64."""
    high, rows = widths[0], weight.double()
    at = [bf.fake_quantize(rows, scale.double(), high=high, low=low, scheme=scheme) for low in widths]
    return torch.stack([(values - rows).square().sum(dim=1) for values in at])


@pytest.mark.parametrize("scheme", ["double_rounding", "nested", "centred"])
def test_a_balanced_start_has_the_least_product_of_errors(scheme: str) -> None:
    """Against every scale of a fine grid, up to what the search's own grid misses."""
    weight = randn(6, 200) * torch.tensor([1e-3, 1.0, 30.0, 1.0, 1.0, 1.0])[:, None]
    weight[4, 0] = 12.0  # an outlier
    found = errors_of(weight, start_of(weight, (6,), scheme=scheme, start="balanced"), scheme).log().sum(dim=0)
    reach = weight.abs().amax(dim=1) / 128
    grid = [errors_of(weight, reach * r, scheme).log().sum(dim=0) for r in torch.linspace(0.1, 2.3, 221).tolist()]
    least = torch.stack(grid).amin(dim=0)
    assert bool((found <= least + 0.1).all()), found - least


def test_no_width_pays_for_another() -> None:
    """Where the sum of errors decides, 2 bits do, and 8 bits are clipped; balanced, 8 bits keep what they can."""
    weight = randn(16, 400, seed=3)
    alone = errors_of(weight, start_of(weight, (16,), bit_choices=(8,)), "double_rounding", (8,)).sum()
    starts = (start_of(weight, (16,), start=start) for start in ("mse", "balanced"))
    summed, balanced = (errors_of(weight, scale, "double_rounding").sum(dim=1) for scale in starts)
    assert summed[0] > 20 * alone
    assert balanced[0] < 4 * alone
    assert balanced[-1] < 3 * summed[-1]


def test_importance_moves_the_balance() -> None:
    weight = randn(16, 400, seed=4)
    errors = {}
    for name, importance in {"even": {}, "high": {8: 8.0}, "low": {2: 8.0}}.items():
        scale = start_of(weight, (16,), start="balanced", importance=importance)
        errors[name] = errors_of(weight, scale, "double_rounding").sum(dim=1)
    assert errors["high"][0] < errors["even"][0] < errors["low"][0]
    assert errors["low"][-1] < errors["even"][-1] < errors["high"][-1]


def test_weights_that_codes_hit_exactly() -> None:
    """No error at all has no logarithm; the search takes it for a very small one."""
    weight = torch.arange(-4.0, 4.0).repeat(2, 4)
    scale = start_of(weight, (2,), start="balanced", bit_choices=(8, 4))
    assert bool(torch.isfinite(scale).all())
    assert float(errors_of(weight, scale, "double_rounding", (8, 4))[0].max()) < 0.05


def test_a_layer_with_a_width_of_its_own_starts_for_that_width_alone() -> None:
    """A shared scale that must serve 2 bits too clips what 8 bits could hold."""
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    for start in ("mse", "balanced", "lsq"):
        config = QuantConfig(bit_choices=(8, 4, 2), start=start)
        shared = weight_scales(weight, (4,), name="x", config=config)[8]
        for bits in (8, 4):
            fixed = weight_scales(weight, (4,), name="x", config=config, fixed_bits=bits)[8]
            errors = [
                (bf.fake_quantize(weight, scale, high=8, low=bits, scheme="double_rounding") - weight).square().sum()
                for scale in (fixed, shared)
            ]
            assert errors[0] < errors[1] or start == "lsq", (start, bits)  # which is no least error
        alone = QuantConfig(bit_choices=(8,), start=start)
        eight = weight_scales(weight, (4,), name="x", config=config, fixed_bits=8)[8]
        assert torch.equal(eight, weight_scales(weight, (4,), name="x", config=alone)[8])


# --- clip ratios of dynamic activations -----------------------------------------------------------


def test_clip_ratios_have_the_least_squared_error_or_the_usual_value() -> None:
    tokens = randn(200, 32, seed=4)
    tokens[:, 3] *= 5
    for start in STARTS:
        found = clip_ratios(tokens, bit_choices=BITS, start=start)
        if start not in ("mse", "balanced"):
            assert [float(found[b]) for b in BITS] == [1.0, 1.0, pytest.approx(0.9), pytest.approx(0.9)], start
            continue

        def error(ratio: float, bits: int) -> float:
            out = bf.fake_quantize_activation(tokens, torch.tensor([ratio]), bits=bits, kind="dynamic")
            return float((out - tokens).square().sum())

        for bits in BITS:
            best = min(error(i / 100, bits) for i in range(10, 101))
            assert 0.1 <= float(found[bits]) <= 1.0
            assert error(float(found[bits]), bits) <= 1.005 * best, (start, bits)
        assert float(found[2]) < float(found[8])
    zero = clip_ratios(torch.zeros(4, 8), bit_choices=(8, 2), start="mse")
    assert [float(ratio) for ratio in zero.values()] == [1.0, pytest.approx(0.9)]


class Tokens(nn.Module):
    """A convolution over images, then Linear layers over its pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 1)
        self.conv = nn.Conv2d(4, 8, 1)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.mix(torch.relu(self.conv(self.stem(x))).flatten(2).transpose(1, 2))))


def test_ratios_come_from_whole_tokens_of_every_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a layer with more tokens than are kept, some are left out, and of a third batch all; what is kept is whole."""
    monkeypatch.setattr(activation_ranges, "MOST_SAMPLES", 40)
    batches = [randn(3, 7, 8, seed=seed) for seed in (1, 2)]
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    monkeypatch.setattr(activation_ranges, "MOST_TOKEN_VALUES", 60)
    layers = dict(model.named_children())
    seen = activation_ranges.observe_inputs(model, layers, [*batches, randn(3, 7, 8)], tokens={"0"})
    kept = torch.cat(seen["0"].tokens)
    assert kept.shape == (2 * 5, 8)  # every fifth of 21
    rows = torch.cat([batch.flatten(0, 1)[::5] for batch in batches])
    assert torch.equal(kept, rows)
    assert not seen["0"].samples
    assert seen["1"].samples
    assert not seen["1"].tokens


def test_convolutions_have_no_tokens() -> None:
    x = randn(2, 2, 3, 3)
    with pytest.raises(ConfigError, match=r"layer 'conv': it is a Conv2d.*Rule\(type='Conv2d', activations='auto'\)"):
        prepare(Tokens(), QuantConfig(activations="dynamic"), x)
    rule = Rule(type="Conv2d", activations="auto")
    model: Any = prepare(Tokens(), QuantConfig(activations="dynamic", keep_first_last=False, rules=(rule,)), x)
    kinds = {n: m.act_quantizer.kind for n, m in model.named_children()}
    assert kinds == {"stem": "signed", "conv": "signed", "mix": "dynamic", "head": "dynamic"}
    report = describe(model)
    assert report.dynamic_layers == ("mix", "head")
    assert "activations    a scale for each token in 2 layers" in str(report)
    assert ModelReport.from_dict(report.to_dict()) == report
    plain = describe(prepare(Tokens(), QuantConfig(), x))
    assert "dynamic_layers" not in plain.to_dict()
    assert "each token" not in str(plain)
    assert ModelReport.from_dict(plain.to_dict()) == plain


def test_embeddings_stay_without_activations() -> None:
    model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 4))
    rules = (Rule(type="Embedding", quantize=True),)
    config = QuantConfig(activations="dynamic", keep_first_last=False, rules=rules)
    made: Any = prepare(model, config, torch.arange(6)[None])
    assert made[0].act_quantizer is None
    assert made[1].act_quantizer.kind == "dynamic"
