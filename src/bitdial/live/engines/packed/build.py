"""From the codes of an artifact to layers on packed words."""

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn

from bitdial import functional as bf
from bitdial.artifact import Artifact
from bitdial.kernels.host_weight_pool import HostWeightPool
from bitdial.kernels.weight_pool import PackedWeightPool
from bitdial.kernels.word_layout import nested_fields, pack_words
from bitdial.live.engines.packed.layers import ArenaBoard, ArenaLinear, NestedLinear

ARENAS: dict[str, type[PackedWeightPool]] = {"device": PackedWeightPool, "host": HostWeightPool}


def packed_linears(
    artifact: Artifact,
    layers: Mapping[str, nn.Module],
    *,
    bit_choices: tuple[int, ...],
    device: torch.device,
    master: str,
) -> dict[nn.Module, nn.Module]:
    """For each of the float `layers` its successor on packed words on `device`, readable at `bit_choices`.

    `master` says where the stored codes of a scheme that rounds anew are kept: 'device' or 'host'. There, tied layers
    have words each, since a plan can give them different widths.
    """
    if bf.scheme_of(artifact.scheme).nests:
        return _nested(artifact, layers, bit_choices, device)
    arena = ARENAS[master](
        {name: artifact.codes(artifact.owner(name)) for name in layers},
        high=artifact.bit_choices[0], bit_choices=bit_choices, scheme=artifact.scheme, ties=artifact.manifest["ties"],
        device=device,
    )  # fmt: skip
    board = ArenaBoard(arena)
    return {
        layer: ArenaLinear(
            cast(nn.Linear, layer), board, name=name, scale=_row_scale(artifact, name, device), high=arena.high,
            stored=arena.high,            bit_choices=arena.bit_choices, scheme=arena.scheme,
        )
        for name, layer in layers.items()
    }  # fmt: skip


def _nested(
    artifact: Artifact, layers: Mapping[str, nn.Module], bit_choices: tuple[int, ...], device: torch.device
) -> dict[nn.Module, nn.Module]:
    """Planes below the widest choice are left out: a floor of the codes, whose step is a power of two larger."""
    stored, high, fields = artifact.bit_choices[0], bit_choices[0], nested_fields(bit_choices)
    words: dict[str, Tensor] = {}  # tied layers share them
    new: dict[nn.Module, nn.Module] = {}
    for name, layer in layers.items():
        owner = artifact.owner(name)
        if owner not in words:
            codes = bf.narrow(artifact.codes(owner), high=stored, low=high, scheme=artifact.scheme)
            words[owner] = pack_words(codes.to(device), fields)
        scale = _row_scale(artifact, name, device) * 2.0 ** (stored - high)
        new[layer] = NestedLinear(
            cast(nn.Linear, layer), words[owner], fields, name=name, scale=scale, high=high, stored=stored,
            bit_choices=bit_choices, scheme=artifact.scheme,
        )  # fmt: skip
    return new


def _row_scale(artifact: Artifact, name: str, device: torch.device) -> Tensor:
    """The scale of each row (rows,), float32, of one step at the stored width."""
    (scale,) = artifact.tensors[f"{artifact.owner(name)}/weight_scale"]
    return scale.expand(artifact.layers[name]["shape"][0]).to(device).clone()
