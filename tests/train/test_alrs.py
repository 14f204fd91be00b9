"""Adaptive Learning Rate Scaling against values computed by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bitdial.errors import ConfigError
from bitdial.train.alrs import eta, layer_peaks, scaled_rate

# Highest width 8, from the paper's formula: 8 bits is 1, 6 is 0.1, 4 is 0.01.
BY_HAND = {0: 1.0, 1: 0.5, 2: 0.1, 3: 0.05, 4: 0.01, 5: 0.005, 6: 0.001}


@pytest.mark.parametrize("shift, expected", BY_HAND.items())
def test_eta(shift: int, expected: float) -> None:
    assert eta(shift) == pytest.approx(expected, rel=1e-12)


def test_eta_refuses_a_width_above_the_highest() -> None:
    with pytest.raises(ConfigError, match="shift=-1"):
        eta(-1)


def test_a_small_gradient_is_taken_as_it_is() -> None:
    peaks = layer_peaks([[torch.tensor([0.1, -0.4, 0.2])]])
    torch.testing.assert_close(peaks, torch.tensor([0.4]))


def test_a_large_gradient_is_clipped_to_norm_one() -> None:
    peaks = layer_peaks([[torch.tensor([3.0, -4.0])]])  # norm 5
    torch.testing.assert_close(peaks, torch.tensor([0.8]))


def test_the_norm_is_that_of_all_scales_of_a_layer_together() -> None:
    weight, activation = torch.tensor([2.0, -3.0]), torch.tensor([6.0])  # norm sqrt(4 + 9 + 36) = 7
    other = torch.tensor([0.25])
    peaks = layer_peaks([[weight, activation], [other], [activation]])
    torch.testing.assert_close(peaks, torch.tensor([6 / 7, 0.25, 1.0]))


def test_a_norm_below_one_is_not_stretched() -> None:
    peaks = layer_peaks([[torch.tensor([0.5]), torch.tensor([0.5])]])  # norm 0.707
    torch.testing.assert_close(peaks, torch.tensor([0.5]))


def test_gradients_of_zero_and_of_other_types() -> None:
    peaks = layer_peaks([[torch.zeros(3)], [torch.tensor([0.5], dtype=torch.float64)], [torch.tensor(0.25).half()]])
    torch.testing.assert_close(peaks, torch.tensor([0.0, 0.5, 0.25]))


def test_layer_peaks_leaves_the_gradients_alone() -> None:
    gradient = torch.tensor([30.0, 40.0])
    layer_peaks([[gradient]])
    assert gradient.tolist() == [30.0, 40.0]


def test_no_layers_no_peaks() -> None:
    assert layer_peaks([]).shape == (0,)


def test_readings_by_hand() -> None:
    assert scaled_rate(0.1, shift=4, peak=0.04, reading="literal") == pytest.approx(0.01 * 0.06)
    assert scaled_rate(0.1, shift=4, peak=0.04, reading="relative") == pytest.approx(0.01 * 0.1 * 0.96)
    assert scaled_rate(0.1, shift=1, peak=0.04, reading="literal") == pytest.approx(0.5 * 0.06)
    assert scaled_rate(0.1, shift=1, peak=0.04, reading="relative") == pytest.approx(0.5 * 0.1 * 0.96)
    assert scaled_rate(0.1, shift=0, peak=0.0, reading="literal") == 0.1
    assert scaled_rate(0.1, shift=0, peak=0.0, reading="relative") == 0.1


def test_off_is_the_learning_rate_at_every_width() -> None:
    assert [scaled_rate(0.3, shift=shift, peak=0.9, reading="off") for shift in range(7)] == [0.3] * 7


def test_the_literal_reading_stands_still_where_the_relative_one_moves() -> None:
    """The paper's rate with lr 5e-4 and any usual gradient is negative; floored, it is 0."""
    assert scaled_rate(5e-4, shift=2, peak=0.01, reading="literal") == 0.0
    assert scaled_rate(5e-4, shift=2, peak=0.01, reading="relative") == pytest.approx(4.95e-5)


def test_an_unknown_reading() -> None:
    with pytest.raises(ConfigError, match="'sideways'"):
        scaled_rate(0.1, shift=0, peak=0.0, reading="sideways")


@given(
    lr=st.floats(0, 10),
    shift=st.integers(0, 6),
    peak=st.floats(0, 2),
    reading=st.sampled_from(["literal", "relative", "off"]),
)
def test_never_negative_and_never_above_the_rate(lr: float, shift: int, peak: float, reading: str) -> None:
    assert 0 <= scaled_rate(lr, shift=shift, peak=peak, reading=reading) <= lr


@given(lr=st.floats(1e-6, 1), peak=st.floats(0, 1), reading=st.sampled_from(["literal", "relative"]))
def test_lower_widths_never_move_faster(lr: float, peak: float, reading: str) -> None:
    rates = [scaled_rate(lr, shift=shift, peak=peak, reading=reading) for shift in range(7)]
    assert rates == sorted(rates, reverse=True)


@given(
    st.lists(
        st.lists(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=4), min_size=1, max_size=3), min_size=1
    )
)
def test_layer_peaks_against_plain_python(layers: list[list[list[float]]]) -> None:
    expected = []
    for gradients in layers:
        flat = [value for gradient in gradients for value in gradient]
        norm = math.sqrt(sum(value * value for value in flat))
        clipped = [value / max(norm, 1.0) for value in flat]
        expected.append(min(max(abs(value) for value in clipped), 1.0))
    peaks = layer_peaks([[torch.tensor(g) for g in gradients] for gradients in layers])
    torch.testing.assert_close(peaks, torch.tensor(expected), rtol=1e-5, atol=1e-30)
