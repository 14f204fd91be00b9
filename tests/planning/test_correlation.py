"""Correlations, against definitions and known values."""

import itertools
import math
import random

import pytest

from bitdial.planning.correlation import pearson, spearman


def by_definition(x: list[float], y: list[float]) -> float:
    """Kendall-free and slow: covariance over the deviations, with sums in exact order."""
    n, mx, my = len(x), math.fsum(x) / len(x), math.fsum(y) / len(y)
    covariance = math.fsum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / n
    return covariance / math.sqrt(math.fsum((a - mx) ** 2 for a in x) / n * math.fsum((b - my) ** 2 for b in y) / n)


def slow_ranks(values: list[float]) -> list[float]:
    """One more than how many are below, and half of the others that are equal."""
    return [1 + sum(v < value for v in values) + (sum(v == value for v in values) - 1) / 2 for value in values]


def test_against_the_definition() -> None:
    rng = random.Random(0)
    for _ in range(50):
        x = [rng.choice([rng.gauss(0, 1), rng.randint(0, 3)]) for _ in range(rng.randint(3, 30))]
        y = [a * rng.uniform(-1, 1) + rng.randint(0, 2) for a in x]
        if len(set(x)) > 1 and len(set(y)) > 1:
            assert pearson(x, y) == pytest.approx(by_definition(x, y), abs=1e-12)
            assert spearman(x, y) == pytest.approx(by_definition(slow_ranks(x), slow_ranks(y)), abs=1e-12)


def test_known_values() -> None:
    assert pearson([1, 2, 3], [2, 4, 6]) == 1
    assert pearson([1, 2, 3], [3, 2, 1]) == -1
    assert pearson([0, 1, 0, 1], [0, 0, 1, 1]) == 0
    curved = [math.exp(v) for v in range(6)]
    assert spearman(range(6), curved) == pytest.approx(1)
    assert 0.5 < pearson(range(6), curved) < 0.9  # type: ignore[operator]
    assert spearman([1, 2, 2, 4], [1, 2, 2, 4]) == pytest.approx(1)


def test_what_does_not_vary_has_none() -> None:
    for x, y in itertools.permutations(([1.0, 1.0, 1.0], [1.0, 2.0, 3.0])):
        assert pearson(x, y) is None
        assert spearman(x, y) is None
    assert pearson([1.0], [2.0]) is None
    assert spearman([], []) is None
