import pytest
import torch
from torch import nn

from bitdial.calibrate.norms import correct_norm, moments, reference_of
from bitdial.calibrate.positions import Moments
from bitdial.errors import QuantizationError


def test_moments_are_those_of_all_batches_together() -> None:
    for shape in ((40, 3), (40, 3, 5), (40, 3, 4, 5)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3 + 100
        found = moments(x.split([7, 13, 20]), "norm")
        rows = x.double().transpose(0, 1).flatten(1)
        torch.testing.assert_close(found.mean, rows.mean(dim=1), rtol=1e-6, atol=0)
        torch.testing.assert_close(found.variance, rows.var(dim=1, correction=0), rtol=1e-4, atol=0)
    with pytest.raises(QuantizationError, match="norm 'a': its input holds NaN"):
        moments([torch.full((2, 3), float("nan"))], "a")


def test_a_shift_and_a_stretch_of_the_input_are_made_up_for() -> None:
    generator = torch.Generator().manual_seed(0)
    plain = nn.BatchNorm2d(3).eval()
    plain.running_mean.copy_(torch.tensor([1.0, -2.0, 0.5]))
    plain.running_var.copy_(torch.tensor([4.0, 0.5, 1.0]))
    x = torch.randn(64, 3, 4, 4, generator=generator)
    x[:, 2] = 0  # says nothing of a variance
    moved = x * torch.tensor([2.0, 0.5, 1.0]).view(3, 1, 1) + torch.tensor([5.0, 0.0, 1.0]).view(3, 1, 1)
    norm = nn.BatchNorm2d(3).eval()
    correct_norm(norm, plain, moments([moved], "n"), moments([x], "n"))
    wanted = plain(x)
    found = norm(moved)
    # Exact where the statistics are the samples' own; else up to (m - mean) * (stretch - 1), which nobody can know.
    torch.testing.assert_close(found[:, 2], wanted[:, 2])
    assert float(norm.running_var[0] / plain.running_var[0]) == pytest.approx(4, rel=1e-5)
    assert float(norm.running_mean[1] - plain.running_mean[1]) == pytest.approx(
        float((-0.5 * x[:, 1]).mean()), abs=1e-6
    )
    assert float(norm.running_var[2]) == 1.0


def test_equal_moments_change_nothing() -> None:
    plain, norm = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    plain.running_mean.copy_(torch.tensor([3.0, 4.0]))
    same = Moments(torch.tensor([1.0, 2.0]).double(), torch.tensor([1.0, 1.0]).double())
    correct_norm(norm, plain, same, same)
    assert torch.equal(norm.running_mean, plain.running_mean)
    assert torch.equal(norm.running_var, plain.running_var)


def test_positions_of_huge_values_that_are_clipped_do_not_stretch_the_others() -> None:
    """A tenth of the images has a corner of 40 standard deviations; quantised, it is clipped to 4."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(100, 64, 7, 7, generator=generator)
    x[::10, :, 0, 0] *= 40
    clipped = x.clamp(-4, 4)
    batches, clipped_batches = x.split(25), clipped.split(25)
    wanted, weights = reference_of(batches, "norm")
    plain, norm = nn.BatchNorm2d(64).eval(), nn.BatchNorm2d(64).eval()
    correct_norm(norm, plain, moments(clipped_batches, "norm", weights), wanted)
    assert float((norm.running_var - 1).abs().max()) < 0.1
    correct_norm(norm, plain, moments(clipped_batches, "norm"), moments(batches, "norm"))
    assert float(norm.running_var.median()) < 0.5


def test_usual_positions_are_all_weighted_alike() -> None:
    x = torch.randn(40, 64, 5, 3, generator=torch.Generator().manual_seed(0)) * 3 + 100
    found = reference_of(x.split([7, 33]), "norm")
    assert found.weights is not None
    assert all(bool((each == 1).all()) for each in found.weights)
    assert reference_of([x[..., 0]], "norm").weights is None, "a sequence"
    torch.testing.assert_close(found.moments.variance, moments([x], "norm").variance, rtol=1e-5, atol=0)
