"""A batch in parts: gradients add up over the parts, and the weights move once for all of them."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from bitdial.errors import TrainingError
from bitdial.prepare.model_call import Batch, sample_lists


@dataclass(frozen=True)
class Part:
    """Some samples of a batch, and their share of all."""

    inputs: Batch
    targets: Any
    index: Tensor | None = None
    share: float = 1.0


def split_batch(inputs: Batch, targets: Any, index: Tensor | None, count: int) -> list[Part]:
    """The batch in `count` parts of nearly one size, or in as many as it has samples.

    Every tensor in it has the samples along its first axis; what is no tensor, or has no axes, goes to all parts. Where
    the inputs are a list of samples, every list in the batch is one.
    """
    if count == 1:
        return [Part(inputs, targets, index)]
    whole = _is_list if sample_lists(inputs) else None
    sizes = {len(leaf) for leaf in tree_leaves((inputs, targets, index), is_leaf=whole) if _is_split(leaf)}
    if len(sizes) != 1 or 0 in sizes:
        raise TrainingError(
            f"accumulate={count} splits a batch along the first axis of its tensors, or its lists, of length "
            f"{sorted(sizes)}; give them one length above 0, or train with accumulate=1"
        )
    (samples,) = sizes
    size = -(-samples // count)
    parts = []
    for start in range(0, samples, size):

        def piece(leaf: Any, start: int = start) -> Any:
            return leaf[start : start + size] if _is_split(leaf) else leaf

        share = min(size, samples - start) / samples
        parts.append(Part(*(tree_map(piece, some, is_leaf=whole) for some in (inputs, targets, index)), share))
    return parts


def _is_split(leaf: object) -> bool:
    return _is_list(leaf) or (isinstance(leaf, Tensor) and leaf.dim() > 0)


def _is_list(leaf: object) -> bool:
    return isinstance(leaf, list)
