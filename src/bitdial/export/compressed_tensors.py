"""Folders in the format of the library compressed-tensors, "pack-quantized", which vLLM loads: one width, weights only.

    X.weight_packed   int32 (rows, inputs * bits / 32): codes + 2^(bits - 1), the first in the lowest bits
    X.weight_scale    float32 (rows, groups) or (rows, 1): one step
    X.weight_shape    int64 (2,)

A weight is code * scale, as it is here, so nothing is rounded: what the format cannot say is refused.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from bitdial.artifact import Artifact, read_artifact
from bitdial.dial.dial import set_bits
from bitdial.errors import ExportError
from bitdial.export.transformers import load_beside, own_type, write_beside
from bitdial.export.transformers_folder import WEIGHTS
from bitdial.files.atomic import replacing
from bitdial.live.layers import LiveLayer

METHOD, FORMAT = "compressed-tensors", "pack-quantized"
WIDTHS = (8, 4)  # what vLLM has kernels for
WORD = 32


class Written(NamedTuple):
    """The folder, and the quantised layers by (bits, inputs of a group; 0 for a scale per row)."""

    folder: Path
    layers: dict[tuple[int, int], list[str]]


def export_compressed_tensors(
    path: str | os.PathLike[str], folder: str | os.PathLike[str], like: str | os.PathLike[str], *, bits: int
) -> Written:
    """Write the artifact at `path`, at a width of 8 or 4, as a folder for vLLM and transformers.

    `like` is the transformers folder of the float model: its config, generation config and tokenizer go along. Codes
    and scales are those of the live model, bit for bit; layers with a width of their own keep it.
    """
    path, folder, like = Path(path), Path(folder), Path(like)
    artifact = read_artifact(path)
    _check(artifact)
    if folder.resolve() == like.resolve() or (folder / WEIGHTS).resolve() == path.resolve():
        raise ExportError(f"{folder} holds the float model or the artifact, whose weights would be lost; name another")
    live = load_beside(path, like, dtype=own_type(like, artifact), kernels="float")
    set_bits(live, bits)
    layers = {name: layer for name, layer in live.named_modules() if isinstance(layer, LiveLayer)}
    groups: dict[tuple[int, int], list[str]] = {}
    tensors = dict(_unquantised(live, layers))
    for name, layer in layers.items():
        codes, scale = _codes_and_scale(name, layer)
        inputs = codes.shape[1] // scale.shape[1] if scale.shape[1] > 1 else 0
        groups.setdefault((layer.weight_bits, inputs), []).append(name)
        tensors[f"{name}.weight_packed"] = pack_words(codes, layer.weight_bits)
        tensors[f"{name}.weight_scale"] = scale
        tensors[f"{name}.weight_shape"] = torch.tensor(codes.shape)
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / WEIGHTS, error=ExportError) as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"})
    write_beside(folder, like, _described(groups, live))
    return Written(folder, groups)


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """Codes (rows, inputs), int8, as words (rows, inputs * bits / 32), int32; the last is filled up with zeros."""
    per_word = WORD // bits
    lifted = codes.to(torch.int64) + (1 << (bits - 1))
    filled = F.pad(lifted, (0, -codes.shape[1] % per_word)).unflatten(1, (-1, per_word))
    words = (filled << torch.arange(0, WORD, bits)).sum(dim=2)
    return (words - ((words >> (WORD - 1)) << WORD)).to(torch.int32)  # the highest bit is the sign


def _check(artifact: Artifact) -> None:
    """Refuse what the format has no words for, by the manifest."""
    for field, what in (("rotation", "is rotated"), ("decomposed", "has modules that were taken apart")):
        if artifact.manifest.get(field):
            raise ExportError(f"the model {what}, which {METHOD} cannot say; export --hf keeps all of it")
    for name, entry in artifact.layers.items():
        if entry["activations"] != "float":
            raise ExportError(
                f"layer {name!r} quantises its input ({entry['activations']}); this format is for weights only, as "
                "QuantConfig(activations='float') makes them"
            )


def _codes_and_scale(name: str, layer: LiveLayer) -> tuple[Tensor, Tensor]:
    """Codes (rows, inputs), int8, and the step of each row or group (rows, groups), float32."""
    bits = layer.weight_bits
    if layer.kind.name != "Linear":
        raise ExportError(f"layer {name!r} is of kind {layer.kind.name}; {METHOD} has Linear layers only")
    if bits not in WIDTHS:
        raise ExportError(f"layer {name!r} is at {bits} bits; {METHOD} folders are for {WIDTHS[0]} or {WIDTHS[1]} bits")
    if layer.codes.offset(bits) != 0:
        raise ExportError(
            f"layer {name!r}: values of scheme {layer.codes.scheme!r} at {bits} bits lie between the integers, which "
            f"{METHOD} cannot say; double_rounding has whole ones at every width, nested at its highest"
        )
    codes, step = layer.codes.weight_codes(bits), layer.codes.step(bits)
    if int(codes.min()) < -(1 << (bits - 1)) or int(codes.max()) >= 1 << (bits - 1):
        raise ExportError(f"layer {name!r} has codes beyond those of {bits} bits")
    return codes, (step if step.dim() == 2 else step.expand(codes.shape[0])[:, None]).contiguous()


def _unquantised(live: nn.Module, layers: dict[str, LiveLayer]) -> Iterator[tuple[str, Tensor]]:
    """The tensors that stay float, by name; a tied one once, as transformers has it."""
    tied = getattr(getattr(live, "config", None), "tie_word_embeddings", False)
    seen: set[int] = set()
    for name, tensor in live.state_dict().items():
        if any(name.startswith(f"{layer}.codes.") for layer in layers):
            continue
        if tensor.data_ptr() in seen and tensor.numel() and tied:
            continue
        seen.add(tensor.data_ptr())
        yield name, tensor.clone().contiguous()


def _described(groups: dict[tuple[int, int], list[str]], live: nn.Module) -> dict[str, Any]:
    """The entry `quantization_config` of config.json."""
    quantised = {name for names in groups.values() for name in names}
    plain = [name for name, layer in live.named_modules() if isinstance(layer, nn.Linear) and name not in quantised]
    entries = {}
    for number, ((bits, inputs), names) in enumerate(groups.items()):
        how = {"strategy": "group", "group_size": inputs} if inputs else {"strategy": "channel", "group_size": None}
        weights = {"num_bits": bits, "type": "int", "symmetric": True, "dynamic": False, **how}
        targets = ["Linear"] if len(groups) == 1 else names
        entries[f"group_{number}"] = {"targets": targets, "weights": weights, "input_activations": None}
    return {
        "quant_method": METHOD, "format": FORMAT, "quantization_status": "compressed", "config_groups": entries,
        "ignore": plain,
    }  # fmt: skip
