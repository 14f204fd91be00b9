import torch

from bitdial import functional as bf
from bitdial.calibrate import rounding
from bitdial.calibrate.group_scales import choose_multiples
from bitdial.calibrate.rounding import Setting, round_jointly

from .test_rounding import correlated, error, moments, table

RUN = 8


def test_multiples_and_codes_of_less_error() -> None:
    """Below what codes alone come to, for one setting and for several; what was given stays as it is."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(2, 5, 4 * RUN, generator=generator)
    second = moments(correlated(256, 4 * RUN)[None]).repeat(2, 1, 1)
    largest = weight.view(2, 5, 4, RUN).abs().amax(dim=3)
    row = largest.amax(dim=2) / 128 / bf.MOST_MULTIPLIER
    multiples = (largest / 128 / row[..., None]).ceil().clamp(max=bf.MOST_MULTIPLIER)
    for widths in ((3,), (8, 4, 3)):
        settings = [Setting(table(8, bits), second) for bits in widths]

        def spread(multiples: torch.Tensor) -> torch.Tensor:
            return (row[..., None] * multiples).repeat_interleave(RUN, dim=2)

        def nearest(multiples: torch.Tensor) -> torch.Tensor:
            return (weight / spread(multiples)).round().clamp(-128, 127).long() + 128

        def loss(codes: torch.Tensor, multiples: torch.Tensor) -> float:
            errors = [error(codes, weight, spread(multiples), one) for one in settings]  # noqa: B023
            return float(sum(each.log().sum() for each in errors))

        before, codes = multiples.clone(), nearest(multiples)
        found, own = choose_multiples(weight, row, multiples, codes, settings, tolerance=1e-6)
        assert torch.equal(multiples, before)
        assert torch.equal(codes, nearest(multiples))
        assert ((found >= 1) & (found <= bf.MOST_MULTIPLIER) & (found == found.round())).all()
        assert ((found - multiples).abs() <= 1).all()
        assert not torch.equal(found, multiples)
        ends = []
        for start, scales in ((codes, multiples), (own, found)):
            ends.append(loss(round_jointly(weight, spread(scales), start, settings, tolerance=1e-6), scales))
        assert ends[1] < ends[0] - 1, widths


def test_what_a_try_says_it_changes_is_what_the_error_changes_by() -> None:
    """The multiple that is kept is the best by the definition of the error, with the codes that come with it."""
    weight = torch.randn(1, 4, 2 * RUN, generator=torch.Generator().manual_seed(3))
    settings = [Setting(table(8, 3), moments(correlated(64, 2 * RUN)[None]))]
    row, multiples = torch.full((1, 4), 0.002), torch.full((1, 4, 2), 8.0)
    spread = (row[..., None] * multiples).repeat_interleave(RUN, dim=2)
    codes = (weight / spread).round().clamp(-128, 127).long() + 128
    found, own = choose_multiples(weight, row, multiples, codes, settings, tolerance=1e-6)
    after = error(own, weight, (row[..., None] * found).repeat_interleave(RUN, dim=2), settings[0])
    assert (after < error(codes, weight, spread, settings[0])).all()
    problem = rounding.Problem(weight, settings, 1e-6)
    problem.start(own, (row[..., None] * found).repeat_interleave(RUN, dim=2))
    damped_error = problem.errors[0]
    torch.testing.assert_close(damped_error, after, rtol=1e-3, atol=1e-4)
