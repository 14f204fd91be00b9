"""Rows of tokens from one long stream, in an order that (seed, step) alone decides: resumable at any step."""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bitdial.errors import ConfigError
from bitdial.train.data import Sample, rank_share

Tokens = npt.NDArray[np.integer]


def rows_in(tokens: int, length: int) -> int:
    """How many rows of `length` inputs, each with the token behind it, lie in a stream of `tokens`."""
    return max((tokens - 1) // length, 0)


class TokenData:
    """Training data for language models: rows of `length` tokens, with the next token of each as its target.

    `tokens` is a stream, a one-dimensional array such as `tokenize_text` gives, or several of them. It may be mapped
    from a disk: only the rows of a batch are read. Row i of a stream begins at token i * length, and what is left at
    its end is not used. Each pass over the rows of all streams has an order of its own. An epoch is `steps` batches
    (default: one pass), and goes on where the one before ended, so that its length decides when there is a report, not
    what is trained. Several ranks take equal shares of each batch.
    """

    resumable = True

    def __init__(
        self,
        tokens: Tokens | Sequence[Tokens],
        *,
        length: int,
        batch_size: int,
        seed: int = 0,
        steps: int | None = None,
        device: str | torch.device = "cpu",
    ):
        for name, value in (("length", length), ("batch_size", batch_size), ("steps", 1 if steps is None else steps)):
            if type(value) is not int or value < 1:
                raise ConfigError(f"{name}={value!r} must be a whole number of at least 1")
        streams = tuple(tokens) if isinstance(tokens, tuple | list) else (tokens,)
        for stream in streams:
            if getattr(stream, "ndim", None) != 1 or not np.issubdtype(stream.dtype, np.integer):
                raise ConfigError("a token stream must be a one-dimensional numpy array of whole numbers")
        self.streams, self.length, self.batch_size, self.seed = streams, length, batch_size, seed
        self.device = torch.device(device)
        self._kept: tuple[int, Tensor] | None = None  # the last pass and its order
        self._counts = [rows_in(len(stream), length) for stream in streams]
        self.samples: int | None = sum(self._counts)
        if self.samples == 0:
            count = sum(map(len, streams))
            raise ConfigError(f"{count} tokens are less than one row of length {length} and the token behind it")
        self.steps = steps or -(-self.samples // batch_size)

    def __len__(self) -> int:
        return self.steps

    def batches(self, epoch: int, *, start: int = 0, rank: int = 0, world: int = 1) -> Iterator[Sample]:
        """The batches of `epoch` from number `start` on."""
        for step in range(epoch * self.steps + start, (epoch + 1) * self.steps):
            index = rank_share(self._order(step * self.batch_size, self.batch_size), rank, world)
            rows = torch.stack([self._row(int(i)) for i in index])
            if self.device.type == "cuda":  # from pinned memory the copy waits for no step before it
                rows = rows.pin_memory()
            rows = rows.to(self.device, non_blocking=True)
            yield Sample(rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), index)

    def _order(self, first: int, count: int) -> Tensor:
        """The rows at places `first` to `first + count` of all passes one behind the other."""
        assert self.samples is not None
        found: list[Tensor] = []
        while count:
            number, place = divmod(first, self.samples)
            part = self._pass(number)[place : place + count]
            found.append(part)
            first, count = first + len(part), count - len(part)
        return torch.cat(found)

    def _pass(self, number: int) -> Tensor:
        """All rows, in the order of one pass."""
        if self._kept is None or self._kept[0] != number:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
            self._kept = (number, torch.randperm(sum(self._counts), generator=generator))
        return self._kept[1]

    def _row(self, index: int) -> Tensor:
        """Row `index` with the token behind it (length + 1,)."""
        for stream, count in zip(self.streams, self._counts, strict=True):
            if index < count:
                part = stream[index * self.length : (index + 1) * self.length + 1]
                return torch.from_numpy(np.asarray(part, dtype=np.int64))
            index -= count
        raise AssertionError("no such row")
