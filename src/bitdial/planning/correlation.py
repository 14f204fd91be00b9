"""How well predicted losses order plans: the correlation with what was measured."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def pearson(x: Sequence[float], y: Sequence[float]) -> float | None:
    """The linear correlation of two equally long lists, from -1 to 1; None where one of them does not vary."""
    if len(x) < 2:
        return None
    a, b = (np.asarray(values, dtype=np.float64) - np.mean(values) for values in (x, y))
    scale = float(np.sqrt((a @ a) * (b @ b)))
    return float(np.clip((a @ b) / scale, -1, 1)) if scale > 0 else None


def spearman(x: Sequence[float], y: Sequence[float]) -> float | None:
    """The correlation of the ranks, where equal values share the mean of their ranks; None where one does not vary."""
    return pearson(_ranks(x).tolist(), _ranks(y).tolist())


def _ranks(values: Sequence[float]) -> npt.NDArray[np.float64]:
    _, place, counts = np.unique(np.asarray(values, dtype=np.float64), return_inverse=True, return_counts=True)
    last = np.cumsum(counts)  # the rank of the last of equal values
    return (last - (counts - 1) / 2)[place]
