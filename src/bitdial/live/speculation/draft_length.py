"""How many tokens to draft before the model checks them.

Say that a drafted token is right with probability a, by itself. A check of n drafted tokens then yields

    1 + a + a^2 + ... + a^n

tokens on average: those drafted up to the first wrong one, and one of the model's own. It costs n drafting passes and
one pass over n + 1 tokens. The length is the n that yields the most tokens a second. n = 0 is plain decoding.

All three numbers are measured as the text is written. What is older than MEMORY checks is forgotten, so a length that
was too slow once is tried again, and drafting itself too.
"""

from collections import deque

MOST = 8  # tokens that are drafted at a time
FIRST = 2  # the first draft, before anything is known of drafts
MEMORY = 64  # checks
PRIOR, WEIGHT = 0.8, 5.0  # the probability to begin with, and the number of drafted tokens that it counts for


class DraftLength:
    """Chooses the number of tokens to draft from what past drafts brought, or is always `fixed`."""

    def __init__(self, fixed: int | None = None):
        self.fixed = fixed
        self._checks = 0
        self._right = self._judged = 0.0
        self._draft: deque[tuple[int, float]] = deque(maxlen=MEMORY)  # (check, seconds of a drafting pass)
        self._check: dict[int, deque[tuple[int, float]]] = {}  # by length: (check, seconds of its pass)

    @property
    def probability(self) -> float:
        """The estimate that a drafted token is right, given that those before it are."""
        return (PRIOR * WEIGHT + self._right) / (WEIGHT + self._judged)

    def choose(self, most: int) -> int:
        """The number of tokens to draft next; at most `most` are of use."""
        if self.fixed is not None:
            return min(self.fixed, most)
        most = min(MOST, most)
        draft = self._least(self._draft)
        plain = self._least(self._check.get(0))
        if plain is None:
            return 0
        if draft is None:
            return min(FIRST, most)
        best, best_rate, tokens, check = 0, 0.0, 0.0, plain
        for length in range(most + 1):
            tokens += self.probability**length
            measured = self._least(self._check.get(length))
            check = check if measured is None else measured  # unknown: that of the next shorter one
            rate = tokens / (length * draft + check)
            if rate > best_rate:
                best, best_rate = length, rate
        return best

    def record(self, drafted: int, judged: int, accepted: int, *, draft_seconds: float, check_seconds: float) -> None:
        """Note a check of `drafted` tokens, and how long all drafting passes and the check took.

        `judged` of them were compared, `accepted` were right.
        """
        self._checks += 1
        keep = 1 - 1 / MEMORY
        self._right, self._judged = self._right * keep + accepted, self._judged * keep + judged
        if drafted:
            self._draft.append((self._checks, draft_seconds / drafted))
        self._check.setdefault(drafted, deque(maxlen=MEMORY)).append((self._checks, check_seconds))

    def _least(self, times: deque[tuple[int, float]] | None) -> float | None:
        """The least of the recent times, as other work on the machine only ever adds to them."""
        return min((seconds for check, seconds in times or () if check > self._checks - MEMORY), default=None)
