"""Adaptive Learning Rate Scaling against values computed by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bitdial.errors import ConfigError
from bitdial.train.alrs import OWN, eta, layer_peaks, own_shares, scaled_rate

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


@pytest.mark.parametrize("reading", OWN)
def test_rates_of_their_own_leave_the_gradient_to_the_shares(reading: str) -> None:
    for shift, expected in BY_HAND.items():
        assert scaled_rate(0.1, shift=shift, peak=0.9, reading=reading) == pytest.approx(0.1 * expected)
    rate = scaled_rate(torch.tensor(0.1), shift=2, peak=torch.tensor(0.9), reading=reading)
    torch.testing.assert_close(rate, torch.tensor(0.01))


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
    reading=st.sampled_from(["literal", "relative", "layer", "channel", "off"]),
)
def test_never_negative_and_never_above_the_rate(lr: float, shift: int, peak: float, reading: str) -> None:
    assert 0 <= scaled_rate(lr, shift=shift, peak=peak, reading=reading) <= lr


@given(lr=st.floats(1e-6, 1), peak=st.floats(0, 1), reading=st.sampled_from(["literal", "relative", *OWN]))
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


# --- rates of their own ---------------------------------------------------------------------------

BY_LAYER = [
    [torch.tensor([2.0, -3.0]), torch.tensor([6.0])],  # norm 7
    [torch.tensor([0.1, -0.4, 0.2])],  # norm below 1: as it is
    [torch.tensor([0.0, 0.0])],
    [torch.tensor([-5.0])],  # clipped to 1, so this one stands still
]


def as_lists(shares: list[list[Tensor]]) -> list[list[list[float]]]:
    return [[share.reshape(-1).tolist() for share in layer] for layer in shares]


def test_a_share_for_each_layer_by_hand() -> None:
    expected = [[1 / 7, 1 / 7], [0.6], [1.0], [0.0]]
    shares = own_shares(BY_LAYER, "layer")
    assert all(share.dim() == 0 for layer in shares for share in layer)
    for layer, wanted in zip(shares, expected, strict=True):
        assert [float(share) for share in layer] == pytest.approx(wanted, abs=1e-6)


def test_a_share_for_each_channel_by_hand() -> None:
    expected = [[[5 / 7, 4 / 7], [1 / 7]], [[0.9, 0.6, 0.8]], [[1.0, 1.0]], [[0.0]]]
    for layer, wanted in zip(as_lists(own_shares(BY_LAYER, "channel")), expected, strict=True):
        for share, numbers in zip(layer, wanted, strict=True):
            assert share == pytest.approx(numbers, abs=1e-6)


@pytest.mark.parametrize("reading", OWN)
def test_a_layer_does_not_slow_down_another(reading: str) -> None:
    calm, wild = [torch.tensor([0.25])], [torch.tensor([1e4, -1e4])]
    alone = own_shares([calm], reading)
    assert as_lists(own_shares([wild, calm], reading))[1:] == as_lists(alone)
    assert float(alone[0][0]) == 0.75


@pytest.mark.parametrize("reading", OWN)
def test_own_shares_leave_the_gradients_alone(reading: str) -> None:
    gradient = torch.tensor([30.0, 40.0], requires_grad=True)
    shares = own_shares([[gradient]], reading)
    assert gradient.tolist() == [30.0, 40.0]
    assert not shares[0][0].requires_grad
    assert own_shares([], reading) == []


LAYERS = st.lists(
    st.lists(
        st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=1, max_size=4),
        min_size=1,
        max_size=3,
    ),
    min_size=1,
    max_size=4,
)


@given(LAYERS, st.sampled_from(OWN))
def test_a_share_is_never_negative_and_never_above_one(layers: list[list[list[float]]], reading: str) -> None:
    gradients = [[torch.tensor(g) for g in layer] for layer in layers]
    for layer, mine in zip(own_shares(gradients, reading), gradients, strict=True):
        for share, gradient in zip(layer, mine, strict=True):
            assert bool(((share >= 0) & (share <= 1)).all())
            assert share.shape in ((), gradient.shape)


@given(LAYERS.map(lambda layers: [[[max(min(v, 1e6), -1e6) for v in g] for g in layer] for layer in layers]))
def test_own_shares_against_plain_python(layers: list[list[list[float]]]) -> None:
    gradients = [[torch.tensor(g) for g in layer] for layer in layers]
    by_layer, by_channel = (as_lists(own_shares(gradients, reading)) for reading in ("layer", "channel"))
    for number, layer in enumerate(layers):
        norm = max(math.sqrt(sum(value * value for gradient in layer for value in gradient)), 1.0)
        largest = max(abs(value) for gradient in layer for value in gradient)
        for place, gradient in enumerate(layer):
            assert by_layer[number][place] == pytest.approx([1 - largest / norm], abs=1e-6)
            assert by_channel[number][place] == pytest.approx([1 - abs(value) / norm for value in gradient], abs=1e-6)
