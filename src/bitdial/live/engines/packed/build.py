"""From the codes of an artifact to packed words."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from bitdial import functional as bf
from bitdial.artifact import Artifact
from bitdial.kernels.host_weight_pool import HostWeightPool
from bitdial.kernels.weight_pool import PackedWeightPool
from bitdial.kernels.word_layout import nested_fields, pack_words
from bitdial.live.engines.packed.board import PoolBoard
from bitdial.live.engines.packed.words import NestedWords, PooledWords

POOLS: dict[str, type[PackedWeightPool]] = {"device": PackedWeightPool, "host": HostWeightPool}


def packed_words(
    artifact: Artifact, names: Iterable[str], *, bit_choices: tuple[int, ...], device: torch.device, master: str
) -> tuple[dict[str, nn.Module], PoolBoard | None]:
    """The words of the layers called `names` on `device`, readable at `bit_choices`, and what switches them.

    `master` says where the stored codes of a scheme that rounds anew are kept: 'device' or 'host'. There, tied layers
    have words each, since a plan can give them different widths.
    """
    if bf.scheme_of(artifact.scheme).nests:
        return _nested(artifact, names, bit_choices, device), None
    pool = POOLS[master](
        {name: artifact.codes(artifact.owner(name)) for name in names},
        high=artifact.bit_choices[0], bit_choices=bit_choices, scheme=artifact.scheme, ties=artifact.manifest["ties"],
        device=device,
    )  # fmt: skip
    board = PoolBoard(pool)
    return {name: PooledWords(board, name, bit_choices[0]) for name in pool.names}, board


def _nested(
    artifact: Artifact, names: Iterable[str], bit_choices: tuple[int, ...], device: torch.device
) -> dict[str, nn.Module]:
    """Planes below the widest choice are left out: a floor of the codes, whose step is a power of two larger."""
    words: dict[str, Tensor] = {}  # tied layers share them
    made: dict[str, nn.Module] = {}
    for name in names:
        owner = artifact.owner(name)
        rows, columns = artifact.layers[owner]["shape"]
        widths = artifact.widths_of(name, bit_choices)
        fields = nested_fields(widths)
        if owner not in words:
            stored = artifact.bit_choices[0]
            codes = bf.narrow(artifact.codes(owner), high=stored, low=widths[0], scheme=artifact.scheme)
            words[owner] = pack_words(codes.to(device), fields)
        made[name] = NestedWords(words[owner], fields, (rows, columns))
    return made
