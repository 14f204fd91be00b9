"""The length of drafts, held to a simulation of what each length brings."""

import random

import pytest

from bitdial.live.speculation.draft_length import FIRST, MEMORY, MOST, DraftLength


def simulated_rate(length: int, right: float, draft: float, check: float) -> float:
    """Tokens a second with drafts of that length, by drawing them."""
    source, tokens, rounds = random.Random(0), 0, 5_000
    for _ in range(rounds):
        count = 0
        while count < length and source.random() < right:
            count += 1
        tokens += count + 1
    return tokens / rounds / (length * draft + check)


def settled(right: float, draft: float, check: float, more: float) -> DraftLength:
    """After many checks in which each drafted token is right with that probability; times as given."""
    source, lengths = random.Random(1), DraftLength()
    for _ in range(4 * MEMORY):
        length = lengths.choose(100)
        accepted = 0
        while accepted < length and source.random() < right:
            accepted += 1
        judged = min(accepted + 1, length)
        lengths.record(
            length, judged, accepted, draft_seconds=length * draft, check_seconds=check * (1 + more * length)
        )
    return lengths


def test_the_length_is_near_the_best() -> None:
    for right, draft, more in ((0.9, 0.47, 0.02), (0.7, 0.3, 0.0), (0.95, 0.1, 0.1), (0.5, 0.9, 0.0), (0.8, 1.0, 0.5)):
        lengths = settled(right, draft, 1.0, more)
        rates = [simulated_rate(n, right, draft, 1 + more * n) for n in range(MOST + 1)]
        chosen = lengths.choose(100)
        assert rates[chosen] > 0.93 * max(rates), (right, draft, more)
        if chosen:
            assert lengths.probability == pytest.approx(right, abs=0.15)


def test_plain_decoding_where_drafts_do_not_pay() -> None:
    """And drafting is tried again, in case that has changed."""
    lengths = settled(0.2, 1.0, 1.0, 0.1)
    chosen = []
    for _ in range(3 * MEMORY):
        chosen.append(lengths.choose(100))
        n = chosen[-1]
        lengths.record(n, min(1, n), 0, draft_seconds=n * 1.0, check_seconds=1 + 0.1 * n)
    assert chosen.count(0) > 0.8 * len(chosen)
    assert any(chosen)


def test_it_measures_first_and_never_drafts_more_than_is_of_use() -> None:
    lengths = DraftLength()
    assert lengths.choose(10) == 0
    lengths.record(0, 0, 0, draft_seconds=0.0, check_seconds=1.0)
    assert lengths.choose(10) == FIRST
    assert lengths.choose(1) == 1
    lengths.record(2, 2, 2, draft_seconds=0.002, check_seconds=1.0)
    assert lengths.choose(100) == MOST, "drafts that cost nothing"
    for most in range(4):
        assert lengths.choose(most) == most
        assert DraftLength(3).choose(most) == min(3, most)
    assert DraftLength(20).choose(100) == 20


def test_one_slow_pass_is_forgotten() -> None:
    """A kernel that is compiled at the first pass of a length does not rule the length out for good."""
    lengths = DraftLength()
    lengths.record(0, 0, 0, draft_seconds=0.0, check_seconds=1.0)
    lengths.record(2, 2, 2, draft_seconds=0.2, check_seconds=30.0)
    assert lengths.choose(1) <= 1
    for length in (4, 0):
        lengths.record(length, length, length, draft_seconds=0.1 * length, check_seconds=30.0 if length else 1.0)
    assert lengths.choose(100) < 2
    for _ in range(MEMORY):
        lengths.record(1, 1, 1, draft_seconds=0.1, check_seconds=1.0)
    assert lengths.choose(100) >= 2 or lengths.choose(100) == 0  # 0: plain passes are measured anew as well
