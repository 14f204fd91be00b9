import torch

from bitdial.calibrate.positions import MOST_ENERGY, as_rows, position_weights, weighted_moments


def test_a_position_counts_by_its_energy_over_the_usual() -> None:
    """Channels are measured by their own spread, wherever they lie."""
    x = torch.tensor([[1.0, -10.0], [-1.0, 10.0], [30.0, 0.0]])  # samples, channels
    mean, variance = torch.tensor([0.0, 0.0]), torch.tensor([1.0, 100.0])
    wanted = torch.tensor([1.0, 1.0, MOST_ENERGY / 450])
    torch.testing.assert_close(position_weights(x, mean, variance, 1), wanted[:, None])
    torch.testing.assert_close(position_weights(x.T, mean, variance, 0), wanted[None])
    constant = position_weights(torch.ones(3, 2), torch.ones(2), torch.zeros(2), 1)
    assert torch.equal(constant, torch.ones(3, 1))


def test_weighted_moments_are_those_of_repeated_columns() -> None:
    x = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0)) + 7
    rows, counts = as_rows(x), torch.arange(20) % 3 + 1
    total, mean, squares = weighted_moments(rows, counts.float()[None])
    size, plain_mean, plain_squares = weighted_moments(rows.repeat_interleave(counts, dim=1), None)
    assert total == size == int(counts.sum())
    torch.testing.assert_close(mean, plain_mean, rtol=1e-6, atol=0)
    torch.testing.assert_close(squares, plain_squares, rtol=1e-5, atol=0)
