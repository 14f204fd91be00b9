import itertools

import pytest
import torch
from torch import Tensor

from bitdial import functional as bf
from bitdial.calibrate import rounding
from bitdial.calibrate.rounding import Setting, Target, round_jointly, segments

SCHEMES = ("double_rounding", "nested", "nested+8", "centred", "truncate")


def table(high: int, low: int, scheme: str = "double_rounding") -> Tensor:
    """What each stored code is worth at `low` bits, in steps of the stored ones."""
    least, most = bf.scheme_of(scheme).stored_range(high)
    codes = bf.narrow(torch.arange(least, most + 1, dtype=torch.int8), high=high, low=low, scheme=scheme)
    return bf.dequantize(codes, torch.ones(1), shift=high - low, scheme=scheme)


def correlated(samples: int, inputs: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(inputs, inputs, generator=generator)
    return torch.randn(samples, inputs, generator=generator) @ (mix + 2 * mix[:1])


def moments(x: Tensor) -> Tensor:
    """Second moments of rows (groups, samples, inputs)."""
    return x.transpose(1, 2) @ x / x.shape[1]


def error(codes: Tensor, weight: Tensor, scale: Tensor, setting: Setting) -> Tensor:
    """The mean square of each row's error, with the damping: from the definition."""
    apart = setting.values[codes] * scale - weight
    damping = rounding.DAMPING * setting.second.diagonal(dim1=1, dim2=2).mean(dim=1)
    return (apart @ setting.second * apart).sum(dim=2) + damping[:, None] * apart.square().sum(dim=2)


def problem(
    high: int, widths: tuple[int, ...], inputs: int, scheme: str = SCHEMES[0]
) -> tuple[Tensor, Tensor, Tensor, list[Setting]]:
    """Weight, scale, nearest codes and settings of a layer with three rows."""
    generator = torch.Generator().manual_seed(inputs)
    weight = torch.randn(1, 3, inputs, generator=generator)
    scale = (weight.abs().amax(dim=2, keepdim=True) / 2 ** (high - 1)).expand_as(weight).contiguous()
    plain = correlated(64, inputs)[None]
    noise = torch.randn(plain.shape, generator=generator)
    settings = [Setting(table(high, b, scheme), moments(plain + 0.1 * (high - b) * noise)) for b in widths]
    values = table(high, high, scheme)
    nearest = (weight[..., None] / scale[..., None] - values).abs().argmin(dim=-1)
    return weight, scale, nearest, settings


def test_segments_are_the_runs_of_codes_that_lower_widths_cannot_tell_apart() -> None:
    for scheme, high in itertools.product(SCHEMES, (8, 4)):
        tables = [table(high, b, scheme) for b in range(2, high)]
        first, last = segments(tables)
        assert first[0] == 0
        assert last[-1] == len(tables[0]) - 1
        assert torch.equal(first[1:], last[:-1] + 1)
        for values in tables:
            assert torch.equal(values[first], values[last])
        apart = torch.stack([values[first[1:]] != values[last[:-1]] for values in tables])
        assert apart.any(dim=0).all()
    assert segments([torch.zeros(5)]).tolist() == [[0], [4]]


def test_no_other_code_of_a_single_weight_is_better(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is found is a minimum along each code, and below the nearest codes."""
    monkeypatch.setattr(rounding, "SWEEPS", 30)
    for scheme, widths in itertools.product(SCHEMES, ((8, 4, 2), (8, 3), (4, 2))):
        if scheme == "nested+8" and widths[0] == 4:
            continue
        weight, scale, nearest, settings = problem(widths[0], widths, inputs=6, scheme=scheme)
        found = round_jointly(weight, scale, nearest, settings, tolerance=1e-4)
        energy = [(weight @ s.second * weight).sum(dim=2) for s in settings]

        def loss(codes: Tensor) -> Tensor:
            """By row, with the weights that the last sweep had."""
            errors = [error(codes, weight, scale, s) for s in settings]  # noqa: B023
            return sum(e / w for e, w in zip(errors, weights, strict=True))  # noqa: B023

        weights = [error(found, weight, scale, s) + 1e-4 * e for s, e in zip(settings, energy, strict=True)]
        best = loss(found)
        for column, code in itertools.product(range(6), range(0, len(settings[0].values), 3)):
            other = found.clone()
            other[:, :, column] = code
            assert (loss(other) >= best * (1 - 1e-3)).all(), (scheme, widths, column, code)
        logs = [
            sum((error(c, weight, scale, s) / e + 1e-4).log().sum() for s, e in zip(settings, energy, strict=True))
            for c in (found, nearest)
        ]
        assert logs[0] < logs[1]


def test_without_correlation_the_nearest_code_is_best() -> None:
    weight, scale, nearest, _ = problem(8, (8,), inputs=16)
    plain = torch.eye(16)[None]
    start = torch.randint(0, 256, nearest.shape, generator=torch.Generator().manual_seed(0))
    found = round_jointly(weight, scale, start, [Setting(table(8, 8), plain)], tolerance=1e-4)
    assert torch.equal(found, nearest)


def test_groups_are_rounded_each_by_itself() -> None:
    weight, scale, nearest, settings = problem(8, (8, 4, 3), inputs=70)
    other = weight.flip(1)  # the same inputs, so that columns come in the same order
    both = [torch.cat([a, b]) for a, b in ((weight, other), (scale, scale.flip(1)), (nearest, nearest.flip(1)))]
    twice = [Setting(s.values, s.second.repeat(2, 1, 1)) for s in settings]
    found = round_jointly(*both, twice, tolerance=1e-4)
    alone = round_jointly(weight, scale, nearest, settings, tolerance=1e-4)
    assert not torch.equal(alone, nearest)
    assert torch.equal(found, torch.cat([alone, alone.flip(1)]))


def test_importance_decides_between_widths() -> None:
    weight, scale, nearest, settings = problem(8, (8, 3), inputs=24)
    found = {}
    for importance in (0.01, 1.0):
        given = [Setting(settings[0].values, settings[0].second, importance), settings[1]]
        codes = round_jointly(weight, scale, nearest, given, tolerance=1e-4)
        found[importance] = [float(error(codes, weight, scale, s).sum()) for s in settings]
    assert found[0.01][0] > found[1.0][0]
    assert found[0.01][1] < found[1.0][1]


def test_a_target_makes_up_for_what_inputs_have_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error against the float outputs is that of the codes against another weight, and a rest."""
    weight, scale, nearest, _ = problem(8, (8,), inputs=12)
    plain = correlated(400, 12)[None]
    noisy = plain + 4 * torch.randn(plain.shape, generator=torch.Generator().manual_seed(2))
    second, moved = moments(noisy), plain - noisy
    cross = moved.transpose(1, 2) @ noisy / 400

    def outputs_apart(codes: Tensor, values: Tensor) -> Tensor:
        return (noisy @ (values[codes] * scale).mT - plain @ weight.mT).square().mean(dim=1)

    with monkeypatch.context() as patch:
        patch.setattr(rounding, "DAMPING", 0.0)
        target = Target(second, cross, moments(moved))
    wanted = weight + weight @ target.change
    apart = table(8, 8)[nearest] * scale - wanted
    found = (apart @ second * apart).sum(dim=2) + (weight @ target.rest * weight).sum(dim=2)
    torch.testing.assert_close(found, outputs_apart(nearest, table(8, 8)), rtol=1e-3, atol=1e-3)
    for bits in (8, 4):
        values = table(8, bits)
        errors = []
        for each in (None, target):
            codes = round_jointly(weight, scale, nearest, [Setting(values, second, target=each)], tolerance=1e-6)
            errors.append(float(outputs_apart(codes, values).sum()))
        assert errors[1] < 0.95 * errors[0], (bits, errors)


def test_where_inputs_have_not_changed_there_is_nothing_to_make_up_for() -> None:
    """Nor a rest, by which a width would count for less: also with inputs of very different sizes, in float32."""
    x = correlated(400, 12)[None] * torch.tensor([300.0, *[1.0] * 11])
    moved = 1e-4 * torch.randn(x.shape, generator=torch.Generator().manual_seed(2))
    target = Target(moments(x), moved.transpose(1, 2) @ x / 400, moments(moved))
    assert float(target.change.abs().max()) < 1e-4
    assert float(target.rest.abs().max()) < 1e-6
    exact = Target(moments(x), torch.zeros(1, 12, 12), torch.zeros(1, 12, 12))
    assert not exact.change.any()
    assert not exact.rest.any()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_codes_found_on_a_gpu_are_as_good() -> None:
    """Others may be found, where sums are rounded otherwise and two codes are as good as each other."""
    weight, scale, nearest, settings = problem(8, (8, 4, 3), inputs=300)
    moved = [Setting(setting.values.cuda(), setting.second.cuda()) for setting in settings]
    there = round_jointly(weight.cuda(), scale.cuda(), nearest.cuda(), moved, tolerance=1e-4).cpu()
    here = round_jointly(weight, scale, nearest, settings, tolerance=1e-4)
    for setting in settings:
        found, wanted = (float(error(codes, weight, scale, setting).sum()) for codes in (there, here))
        assert found == pytest.approx(wanted, rel=0.1)
