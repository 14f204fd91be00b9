"""Scales, ticks, and drawings that are as wide as their page."""

import math

import pytest

from bitdial.report.charts.plot import Plot, Scale, log_scale, percent_scale
from bitdial.report.markup import to_html


def test_values_lie_between_the_ends_and_what_is_beyond_at_them() -> None:
    assert [Scale(2, 6).at(value) for value in (1, 2, 3, 6, 9)] == [0, 0, 0.25, 1, 1]
    assert [Scale(0.01, 100, log=True).at(v) for v in (-1, 0, 0.01, 1, 100)] == pytest.approx([0, 0, 0, 0.5, 1])


def test_ticks_are_round_and_few() -> None:
    assert Scale(0, 10).ticks() == [0, 2, 4, 6, 8, 10]
    assert Scale(95.3, 100.2).ticks() == [96, 97, 98, 99, 100]
    assert Scale(-130, 127).ticks() == [-100, -50, 0, 50, 100]
    assert Scale(0.02, 300, log=True).ticks() == pytest.approx([0.1, 1, 10, 100])
    assert len(Scale(1e-9, 1e9, log=True).ticks()) <= 5
    for low, high in ((0, 1e-7), (3, 3.001), (1e6, 9e8), (-5, -4)):
        ticks = Scale(low, high).ticks()
        assert 3 <= len(ticks) <= 7, (low, high, ticks)
        assert all(low - 1e-9 * abs(low) <= tick <= high + 1e-9 * abs(high) for tick in ticks)
        assert len({Scale(low, high).text(tick) for tick in ticks}) == len(ticks)
    texts = [Scale(0, 1).text(value) for value in (3 * 0.1, -0.25, 12_000, 2_500_000, 3e9, 0)]
    assert texts == ["0.3", "−0.25", "12,000", "2.5\u00a0M", "3\u00a0G", "0"]


def test_accuracies_have_room_around_them_and_little_beyond_100() -> None:
    for values in ([1.0, 1.0], [0.0, 0.001], [0.98, 0.981], [0.1, 0.9]):
        scale = percent_scale(values)
        assert scale.low < 100 * min(values)
        assert scale.high > 100 * max(values)
        assert scale.high <= 100 + 0.1 * max(2, 100 * (max(values) - min(values)))
        assert len([tick for tick in scale.ticks() if 0 <= tick <= 100]) >= 2


def test_a_logarithmic_scale_has_two_powers_of_ten_at_least() -> None:
    for values in ([0.3], [2.0, 3.0], [1e-5, 1.0]):
        scale = log_scale(values)
        assert scale.low < min(values) <= max(values) < scale.high
        assert len(scale.ticks()) >= 2
        assert all(math.log10(tick) == pytest.approx(round(math.log10(tick))) for tick in scale.ticks())


def test_a_drawing_has_no_width_in_pixels() -> None:
    plot = Plot('a "b" <c>', 100, Scale(0, 4), Scale(0, 10))
    plot.point("w4", "tip <1>", plot.at(1, plot.shape(2.5, "M0 0Z")), setting=3)
    plot.curve([(0, 0), (4, 10)], "w4")
    plot.curve([(0, 0), (2, 10), (4, 10)], "w4", steps=True)
    text = to_html(plot.svg)
    label = 'aria-label="a &quot;b&quot; <c&gt;"'
    assert text.startswith(f'<svg class="plot" role="group" {label} width="100%" height="100">')
    assert '<g class="point w4" data-setting="3"><title>tip &lt;1&gt;</title><svg x="25%">' in text
    assert 'transform="translate(0 75.0)"' in text
    assert 'd="M0 100L100 0"' in text
    assert 'd="M0 100H50V0H100V0"' in text
    assert text.count('viewBox="0 0 100 100" preserveAspectRatio="none"') == 2
    assert plot.bar(1, 3, 5, 6).attrib == {"x": "25%", "width": "50%", "y": "5", "height": "6"}
    assert plot.whisker(0, 10).get("d") == "M0 0.0V100.0M-5 0.0H5M-5 100.0H5"
