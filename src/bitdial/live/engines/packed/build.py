"""From the codes of an artifact to packed words."""

from collections.abc import Iterable, Sequence
from itertools import groupby

import torch
from torch import Tensor, nn

from bitdial import functional as bf
from bitdial.artifact import Artifact
from bitdial.kernels.host_weight_pool import HostWeightPool
from bitdial.kernels.weight_pool import PackedWeightPool
from bitdial.kernels.word_layout import TILE_ROWS, nested_fields, pack_words, words_shape
from bitdial.live.engines.packed.board import PoolBoard
from bitdial.live.engines.packed.words import NestedWords, PooledWords

Groups = Sequence[Sequence[str]]

POOLS: dict[str, type[PackedWeightPool]] = {"device": PackedWeightPool, "host": HostWeightPool}


def joinable(artifact: Artifact, groups: Groups, bit_choices: tuple[int, ...]) -> list[tuple[str, ...]]:
    """The runs in `groups` of layers on one input whose words can lie together, readable at `bit_choices`.

    They have whole row tiles, their words are no other layer's too, and they are of one form: columns, widths, kind of
    scales, with a bias or without.
    """
    owners = [artifact.owner(name) for name in artifact.layers]

    def form(name: str) -> tuple[object, ...] | None:
        entry = artifact.layers[name]
        rows, columns = entry["shape"]
        if rows % TILE_ROWS or owners.count(artifact.owner(name)) > 1:
            return None
        scales = entry.get("group_size"), artifact.group_scale(name) is None
        return columns, artifact.widths_of(name, bit_choices), *scales, entry["bias"]

    runs = [(key, tuple(run)) for group in groups for key, run in groupby(group, form)]
    return [run for key, run in runs if key is not None and len(run) > 1]


def packed_words(
    artifact: Artifact,
    names: Iterable[str],
    *,
    bit_choices: tuple[int, ...],
    device: torch.device,
    master: str,
    joined: Groups = (),
) -> tuple[dict[str, nn.Module], PoolBoard | None]:
    """The words of the layers called `names` on `device`, readable at `bit_choices`, and what switches them.

    The words of each group in `joined`, which are `joinable`, lie one after the other.

    `master` says where the stored codes of a scheme that rounds anew are kept: 'device' or 'host'. There, tied layers
    have words each, since a plan can give them different widths.
    """
    if bf.scheme_of(artifact.scheme).nests:
        return _nested(artifact, names, bit_choices, device, joined), None
    pool = POOLS[master](
        {name: artifact.codes(artifact.owner(name)) for name in names},
        high=artifact.bit_choices[0], bit_choices=bit_choices, scheme=artifact.scheme, ties=artifact.manifest["ties"],
        device=device, joined=joined,
    )  # fmt: skip
    board = PoolBoard(pool)
    return {name: PooledWords(board, name, bit_choices[0]) for name in pool.names}, board


def _nested(
    artifact: Artifact, names: Iterable[str], bit_choices: tuple[int, ...], device: torch.device, joined: Groups
) -> dict[str, nn.Module]:
    """Planes below the widest choice are left out: a floor of the codes, whose step is a power of two larger."""
    words: dict[str, Tensor] = {}  # tied layers share them
    made: dict[str, nn.Module] = {}
    rooms = {name: room for group in joined for name, room in _rooms(artifact, group, bit_choices, device).items()}
    for name in names:
        owner = artifact.owner(name)
        rows, columns = artifact.layers[owner]["shape"]
        widths = artifact.widths_of(name, bit_choices)
        fields = nested_fields(widths)
        if owner not in words:
            stored = artifact.bit_choices[0]
            codes = bf.narrow(artifact.codes(owner), high=stored, low=widths[0], scheme=artifact.scheme)
            packed = pack_words(codes.to(device), fields)
            words[owner] = rooms[owner].copy_(packed) if owner in rooms else packed
        made[name] = NestedWords(words[owner], fields, (rows, columns))
    return made


def _rooms(
    artifact: Artifact, group: Sequence[str], bit_choices: tuple[int, ...], device: torch.device
) -> dict[str, Tensor]:
    """For each layer of `group` its part of one new buffer."""
    fields = nested_fields(artifact.widths_of(group[0], bit_choices))
    rows = {name: artifact.layers[name]["shape"][0] for name in group}
    shape = words_shape(fields, sum(rows.values()), artifact.layers[group[0]]["shape"][1])
    parts = torch.empty(shape, dtype=torch.int32, device=device).split([r // TILE_ROWS for r in rows.values()], dim=1)
    return dict(zip(rows, parts, strict=True))
