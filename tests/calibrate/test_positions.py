import pytest
import torch

from bitdial.calibrate.positions import MOST_ENERGY, moments_of, position_weights


def test_a_position_counts_by_its_energy_over_the_usual() -> None:
    """Channels are measured by their own spread, wherever they lie; the moments are those of all batches."""
    x = torch.randn(200, 32, generator=torch.Generator().manual_seed(0)) * torch.arange(1, 33) + 5  # samples, channels
    x[7] *= 30
    mean, variance = x.double().mean(dim=0), x.double().var(dim=0, correction=0)
    energy = ((x - mean).square() / variance).mean(dim=1)
    wanted = (MOST_ENERGY / energy).clamp_max(1.0).float()
    assert float(wanted[7]) < 0.05
    assert int((wanted < 1).sum()) == 1
    found = position_weights(x.split([50, 150]), 1)
    torch.testing.assert_close(torch.cat(found), wanted[:, None], rtol=1e-4, atol=0)
    torch.testing.assert_close(position_weights([x.T.contiguous()], 0)[0], wanted[None], rtol=1e-4, atol=0)
    assert torch.equal(position_weights([torch.ones(3, 2)], 1)[0], torch.ones(3, 1)), "a channel without a spread"


def test_moments_are_those_of_all_batches_whatever_their_sizes() -> None:
    x = torch.randn(9, 3, 5, generator=torch.Generator().manual_seed(0)) + 7
    rows = x.movedim(1, 0).flatten(1).double()
    for sizes in ([9], [4, 1, 0, 4]):
        found = moments_of(x.split(sizes), 1)
        torch.testing.assert_close(found.mean, rows.mean(dim=1), rtol=1e-6, atol=0)
        torch.testing.assert_close(found.variance, rows.var(dim=1, correction=0), rtol=1e-5, atol=0)
    with pytest.warns(UserWarning, match="degrees of freedom"):
        assert moments_of([x[:0]], 1).mean.isnan().all()


def test_weighted_moments_are_those_of_repeated_positions() -> None:
    x = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0)) + 7
    counts = torch.arange(20).view(4, 1, 5) % 3 + 1
    found = moments_of(x.split(2), 1, counts.float().split(2))
    rows = x.movedim(1, 0).flatten(1).repeat_interleave(counts.flatten(), dim=1).double()
    torch.testing.assert_close(found.mean, rows.mean(dim=1), rtol=1e-6, atol=0)
    torch.testing.assert_close(found.variance, rows.var(dim=1, correction=0), rtol=1e-5, atol=0)
