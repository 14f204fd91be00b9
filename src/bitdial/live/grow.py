"""Add widths to a live model: further parts of its progressive file.

A live model has room for every width of its file from the start. So growing writes in place: the bits of further planes
into codes, the rows of further widths into scales and norms. Nothing that the model computes at the widths that it has
changes, and no tensor moves, so recorded CUDA graphs stay valid.
"""

import dataclasses
import os
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from bitdial.artifact import Artifact
from bitdial.artifact.layers import check_phase_of
from bitdial.artifact.parts import Layout, Piece
from bitdial.artifact.tensors import check_rows
from bitdial.dial.dial import STORED_PLANS, SWITCHBOARD, unwrap
from bitdial.errors import ArtifactError, ConfigError
from bitdial.files.parts import PartedFile, read_parts
from bitdial.live.codes import StoredCodes
from bitdial.live.engines.integer.norms import IntegerSwitchableNorm
from bitdial.live.engines.integer.switchboard import Switchboard
from bitdial.live.layers import LiveLayer
from bitdial.nn import ActivationSite, SwitchableBatchNorm

PARTS = "_bitdial_parts"  # the attribute by which a live model knows its progressive file: an Artifact without tensors


class _Write(NamedTuple):
    """What is to be written into `target`, in place."""

    target: Tensor
    values: Tensor


def remember_parts(live: nn.Module, artifact: Artifact) -> None:
    """Let `live`, made of the progressive `artifact`, know which file it is of, in place."""
    setattr(live, PARTS, dataclasses.replace(artifact, tensors={}))


@torch.inference_mode(False)
def grow(live: nn.Module, path: str | os.PathLike[str], *, bits: int | None = None) -> tuple[int, ...]:
    """Add to `live`, in place, the widths that the progressive file at `path` has more; returns all that it offers.

    `live` was loaded when the file was shorter, or by `load(path, bit_choices=...)`. Only parts that it lacks are read,
    up to that of `bits`. It stays at its setting, and on float kernels it may run in another thread meanwhile. If
    anything is off, nothing changes. Packed kernels have no room for further widths: such models cannot grow.
    """
    model = unwrap(live)
    known: Artifact | None = getattr(model, PARTS, None)
    if known is None:
        raise ConfigError("the model is not one that load() made of a progressive file, so no parts can be added to it")
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, LiveLayer)}
    for name, layer in layers.items():
        if not isinstance(layer.codes.source, StoredCodes):
            raise ConfigError(
                f"layer {name!r} runs on packed kernels, which have room for the widths that were loaded and no "
                "others; load the file again, with bit_choices as they are to be"
            )
    most = 8 if bits is None else bits
    file = read_parts(path, error=ArtifactError, above=known.available[0], upto=most)
    grown = dataclasses.replace(known, widest=_widest(path, file, known, bits))
    assert file is not None
    grown.file_bytes = file.size
    try:
        writes = [*_writes(model, file, grown)]
    except ArtifactError as problem:
        raise ArtifactError(f"{path}: {problem}") from problem
    with torch.no_grad():
        for target, values in writes:
            target.copy_(values)
    if isinstance(board := getattr(model, SWITCHBOARD, None), Switchboard):
        board.reload_all()
    for name, layer in layers.items():
        layer.bit_choices = grown.widths_of(name, grown.available)
    setattr(model, STORED_PLANS, grown.available_plans())
    setattr(model, PARTS, grown)
    return grown.available


def _widest(path: str | os.PathLike[str], file: PartedFile | None, known: Artifact, bits: int | None) -> int | None:
    """The widest part that the model will have, None if that is the last; ArtifactError if `file` will not do."""
    if file is None or file.digest != known.digest:
        raise ArtifactError(f"{path} is not the progressive file that the model was loaded from, as a whole or cut")
    if bits is not None and bits not in known.bit_choices:
        raise ConfigError(f"bits={bits} is not one of the file's widths {known.bit_choices}")
    if bits is not None and bits not in file.there:
        raise ArtifactError(
            f"{path} ends at byte {file.size} of {file.parts[-1].end}, before the end of its part of {bits} bits; get "
            "the rest first"
        )
    read = [each for each in file.there if bits is None or each <= bits]
    widest = max(known.available[0], *read)
    return None if widest == known.bit_choices[0] else widest


def _writes(model: nn.Module, file: PartedFile, grown: Artifact) -> Iterator[_Write]:
    """Where what has been read of the parts goes; checks the values."""
    layout = Layout(grown.manifest)
    added: dict[str, Tensor] = {}  # to the codes of a layer, by all of the parts
    for piece in layout.pieces(file):
        owner, _, part = piece.name.rpartition("/")
        if owner in grown.layers and part == "codes":
            codes = layout.new_codes(piece)
            added[owner] = added[owner] | codes if owner in added else codes
        else:
            yield from _row_writes(model.get_submodule(owner), piece, grown)
    for name in grown.layers:
        if (more := added.get(grown.owner(name))) is not None:
            stored = model.get_submodule(name).codes.source.stored  # type: ignore[union-attr]
            assert isinstance(stored, Tensor)
            values = stored | more.view(stored.shape).to(stored.device)
            check_phase_of(grown, name, values)
            yield _Write(stored, values)


def _row_writes(module: nn.Module, piece: Piece, grown: Artifact) -> Iterator[_Write]:
    """Where the rows of a tensor go that `module` has in the file."""
    targets = _rows(module, piece.name.rpartition("/")[2])
    widths = [grown.bit_choices[row] for row in piece.rows] if len(targets) == len(grown.bit_choices) else []
    check_rows(piece.name, piece.values, widths)
    for row, values in zip(piece.rows, piece.values, strict=True):
        yield _Write(targets[row], values.reshape(targets[row].shape))


def _rows(module: nn.Module, part: str) -> list[Tensor]:
    """The tensors of `module`, one for each row that the file has of its `part`."""
    if isinstance(module, LiveLayer):
        rows = module.codes.act_zero_point if part == "act_zero_point" else module.codes.act_scale
        assert rows is not None
        return list(rows.split(1))
    if isinstance(module, ActivationSite):
        return [module.quantizer.scales[str(bits)] for bits in module.bit_choices]
    norm = module.plain() if isinstance(module, IntegerSwitchableNorm) else module
    assert isinstance(norm, SwitchableBatchNorm)
    return [norm.sets[key].state_dict(keep_vars=True)[part] for key in norm.holders(part)]
