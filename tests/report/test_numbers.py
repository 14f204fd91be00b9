"""Numbers for readers, and intervals from first principles."""

import math
from typing import Any

import pytest

from bitdial.errors import ConfigError
from bitdial.report import numbers
from bitdial.report.numbers import Samples, by_bits, wilson


def test_the_ends_of_an_interval_are_the_shares_that_the_count_is_1_96_deviations_from() -> None:
    """Wilson's interval is where a normal test of the share at its own deviation no longer refuses it."""
    for right, count in ((0, 10), (10, 10), (1, 1), (495, 500), (389, 401), (5_000, 10_000)):
        for end in wilson(right, count):
            assert 0 <= end <= 1
            deviation = math.sqrt(end * (1 - end) / count)
            assert abs(right / count - end) == pytest.approx(1.959964 * deviation, abs=1e-9)
    # The examples of Newcombe (1998), Statistics in Medicine 17, method 3.
    examples = {
        (81, 263): (0.2553, 0.3662),
        (15, 148): (0.0624, 0.1605),
        (0, 20): (0, 0.1611),
        (1, 29): (0.0061, 0.1718),
    }
    for (right, count), ends in examples.items():
        assert wilson(right, count) == pytest.approx(ends, abs=5.1e-5)


def test_only_a_count_of_right_answers_has_an_interval() -> None:
    samples = Samples(500, "test images")
    assert samples.interval(0.986) == wilson(493, 500)
    assert samples.interval(1.0) == wilson(500, 500)
    for value in (0.9861, 0.5005, 1.2, -0.002):
        assert samples.interval(value) is None
    assert str(Samples(10_000, "images")) == "10,000 images"
    with pytest.raises(ConfigError, match="at least one sample"):
        Samples(0, "images")


def test_texts() -> None:
    assert numbers.percent(0.9864) == "98.6 %"
    assert numbers.interval_text((0.9712, 0.9934)) == "97.1 to 99.3 %"
    assert numbers.interval_text(None) == "–"
    assert numbers.measured_text(0.5, None) == "50.0 %"
    assert numbers.measured_text(0.5, (0.4, 0.6)) == "50.0 %, 95 % interval 40.0 to 60.0 %"
    assert [numbers.difference(v, 0.975) for v in (0.98, 0.9749, 0.9)] == ["+0.5 points", "+0.0 points", "−7.5 points"]
    assert [numbers.counted(n, "file") for n in (1, 2000)] == ["1 file", "2,000 files"]
    assert [numbers.power_of_ten(v) for v in (0.001, 1.0, 100.0, 0.0)] == ["10⁻³", "10⁰", "10²", "0"]
    assert numbers.shortened("conv1") == "conv1"
    assert numbers.shortened("a" * 30 + ".layer9.conv2", 20) == "aaaaaa….layer9.conv2"
    assert len(numbers.shortened("x" * 99)) == 40


def test_bytes() -> None:
    expected = {0: "0 bytes", 999: "999 bytes", 1000: "1.0 kB", 999_949: "999.9 kB", 999_951: "1.0 MB", 5e9: "5.0 GB"}
    assert {count: numbers.format_bytes(count) for count in expected} == expected


def test_widths_are_numbers_in_falling_order_and_others_are_refused() -> None:
    assert list(by_bits({"2": "a", 8: "b", "4": "c"}).items()) == [(8, "b"), (4, "c"), (2, "a")]
    wrong: list[dict[Any, float]] = [{}, {9: 0.5}, {"x": 0.5}, {1: 0.5}, {"all": 1}]
    for values in wrong:
        with pytest.raises(ConfigError, match="bit-width"):
            by_bits(values)
