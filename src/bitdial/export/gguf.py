"""GGUF files, which llama.cpp and programs around it run: one width or plan, weights only.

The container, the names and the special tokens are the library's (PyPI gguf). Blocks are made of our codes and scales,
never quantised again, and decoded by the library to see what rounding scales to halves has cost.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from bitdial.artifact import Artifact, read_artifact
from bitdial.dial.dial import set_bits
from bitdial.dial.plan import BitPlan, LayerBits
from bitdial.errors import ConfigError, ExportError, MissingDependencyError
from bitdial.export.gguf_blocks import TYPES, Array, Packed, Rounding, Weight, packed, weight_at
from bitdial.export.gguf_model import NamedModel, check_type
from bitdial.export.gguf_tokenizer import add_tokenizer
from bitdial.export.transformers import CONFIG, load_beside
from bitdial.files.atomic import read_json, replacing
from bitdial.live.layers import LiveLayer

KINDS = ("Linear", "Embedding")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
FILE_TYPES = {"F32": "ALL_F32", "Q3_K": "MOSTLY_Q3_K_M", "Q4_K": "MOSTLY_Q4_K_M", "Q5_K": "MOSTLY_Q5_K_M"}


class GgufExport(NamedTuple):
    """The file, the quantised layers by GGUF's type, and what rounding cost those in which it could not be avoided."""

    path: Path
    bytes: int
    types: dict[str, list[str]]
    rounded: dict[str, Rounding]


class Stored(NamedTuple):
    """A tensor as the file has it: GGUF's name and type, and its values or bytes."""

    name: str
    type: str
    data: Array


def export_gguf(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    like: str | os.PathLike[str],
    *,
    bits: LayerBits | BitPlan | str,
    exact: bool = False,
    tokenizer: bool = True,
) -> GgufExport:
    """Write the artifact at `path`, a Llama, Qwen2 or Gemma at one setting, as the GGUF file `out` for llama.cpp.

    `like` is the transformers folder of the float model: its config and its tokenizer go along. Each layer has the
    smallest type that says its codes and scales. Types have scales in 16 bits: where ours are not, they are rounded,
    and `rounded` says how far weights move. With `exact` that is refused. Without `tokenizer` the file takes token ids.
    """
    path, out, like = Path(path), Path(out), Path(like)
    if out.resolve() == path.resolve():
        raise ExportError(f"{out} is the artifact, which would be lost; name another file")
    _check_installed()
    artifact = read_artifact(path)
    _check(artifact, like)
    live = load_beside(path, like, dtype=torch.float32, kernels="float")
    set_bits(live, bits)
    model = NamedModel(live)
    layers = {name: layer for name, layer in live.named_modules() if isinstance(layer, LiveLayer)}
    made = {name: _packed(name, layer, model) for name, layer in _once(live, layers).items()}
    rounded = {name: each.rounding for name, each in made.items() if each.rounding != (0, 0)}
    if exact and rounded:
        name, worst = max(rounded.items(), key=lambda item: item[1].rms)
        raise ExportError(
            f"layer {name!r} has scales beyond 16 bits, by {worst.rms:.1e} of its weights; without exact they are "
            "rounded (to half precision)"
        )
    tensors = [Stored(model.name(f"{name}.weight"), each.type, each.blocks) for name, each in made.items()]
    tensors += _unquantised(live, layers, model)
    _write(out, model, like, tensors, tokenizer=tokenizer)
    types: dict[str, list[str]] = {}
    for name, each in made.items():
        types.setdefault(each.type, []).append(name)
    return GgufExport(out, out.stat().st_size, types, rounded)


def _check_installed() -> None:
    try:
        import gguf  # noqa: F401
    except ImportError as problem:
        raise MissingDependencyError.missing("gguf", "gguf") from problem


def _check(artifact: Artifact, like: Path) -> None:
    """Refuse what the format has no words for, by the manifest and the config, before anything is built."""
    try:
        settings = read_json(like / CONFIG)
    except ConfigError as problem:
        raise ExportError(f"{like} is no transformers folder: {problem}") from problem
    check_type(settings.get("model_type") if isinstance(settings, dict) else None)
    for field, what in (("rotation", "is rotated"), ("decomposed", "has modules that were taken apart")):
        if artifact.manifest.get(field):
            raise ExportError(f"the model {what}, which GGUF cannot say; export --hf keeps all of it")
    if artifact.sites:
        raise ExportError("the model quantises products of activations, which GGUF cannot say; export --hf keeps them")
    for name, entry in artifact.layers.items():
        if entry["activations"] != "float":
            raise ExportError(
                f"layer {name!r} quantises its input ({entry['activations']}); GGUF is for weights only, as "
                "QuantConfig(activations='float') makes them"
            )
        if entry["type"] not in KINDS:
            raise ExportError(f"layer {name!r} is of kind {entry['type']}; GGUF has {' and '.join(KINDS)} here")


# --- tensors --------------------------------------------------------------------------------------


def _once(live: nn.Module, layers: dict[str, LiveLayer]) -> dict[str, LiveLayer]:
    """`layers` without a head that has the embedding's weight: llama.cpp then takes that."""
    head, embedding = (layers.get(name.removesuffix(".weight")) for name in (HEAD, EMBEDDING))
    if head is None or embedding is None or head.weight_bits != embedding.weight_bits:
        return layers
    bits = head.weight_bits
    same = torch.equal(head.codes.weight_codes(bits), embedding.codes.weight_codes(bits)) and torch.equal(
        head.codes.step(bits), embedding.codes.step(bits)
    )
    return {name: layer for name, layer in layers.items() if layer is not head or not same}


def _packed(name: str, layer: LiveLayer, model: NamedModel) -> Packed:
    bits = layer.weight_bits
    weight = weight_at(layer.codes, bits)
    low, high = (int(value) for value in weight.codes.aminmax())
    if low < weight.least or high > weight.most:
        raise ExportError(f"layer {name!r} has codes beyond those of {bits} bits; is the file damaged?")
    found = packed(weight.rows(model.order(f"{name}.weight", len(weight.codes))))
    if found is None:
        raise ExportError(f"layer {name!r} fits no block of GGUF: {_misfit(layer, weight)}")
    return found


def _misfit(layer: LiveLayer, weight: Weight) -> str:
    """Why no type holds a weight, and a way out."""
    inputs, groups = weight.codes.shape[1], weight.step.shape[1]
    if inputs % 32:
        return f"they have 32 inputs, a row of it {inputs}; leave it in float by a Rule with quantize=False"
    if groups > 1 and inputs // groups % 32:
        return f"they have 32 inputs with one scale, its groups {inputs // groups}; group_size=32 or 64 fits"
    bits, scheme = layer.weight_bits, layer.codes.scheme
    if not any(kind.holds(weight) for kind in TYPES):
        return f"values of scheme {scheme!r} at {bits} bits need more than int8; lower widths fit, and so does 'nested'"
    return "its scales are beyond those of half precision"


def _unquantised(live: nn.Module, layers: dict[str, LiveLayer], model: NamedModel) -> Iterator[Stored]:
    """The tensors that stay float; a tied head not again."""
    state = live.state_dict()
    tied = model.config.tie_word_embeddings
    for name, tensor in state.items():
        if any(name.startswith(f"{layer}.codes.") for layer in layers):
            continue
        if name == HEAD and tied and EMBEDDING in state and torch.equal(tensor, state[EMBEDDING]):
            continue
        yield Stored(model.name(name), *_smallest(model.adjusted(name, tensor)))
    if (factors := model.rope_factors()) is not None:
        yield Stored("rope_freqs.weight", *_smallest(factors))


def _smallest(tensor: Tensor) -> tuple[str, Array]:
    """The type of fewest bytes that has all its values, and the values; vectors are float32 as llama.cpp wants them."""
    if tensor.dim() > 1:
        if torch.equal(tensor.half().float(), tensor):
            return "F16", tensor.half().contiguous().numpy()
        if torch.equal(tensor.bfloat16().float(), tensor):
            return "BF16", tensor.bfloat16().contiguous().view(torch.uint8).numpy()
    return "F32", tensor.float().contiguous().numpy()


# --- writing --------------------------------------------------------------------------------------


def _write(out: Path, model: NamedModel, like: Path, tensors: list[Stored], *, tokenizer: bool) -> None:
    from gguf import GGML_QUANT_VERSION, GGMLQuantizationType, GGUFWriter, LlamaFileType

    writer = GGUFWriter(None, model.architecture.name)
    writer.add_type("model")
    writer.add_name(like.absolute().name)
    model.describe(writer)
    sizes: dict[str, int] = {}
    for each in tensors:
        sizes[each.type] = sizes.get(each.type, 0) + each.data.nbytes
        raw = GGMLQuantizationType[each.type]
        writer.add_tensor(each.name, np.ascontiguousarray(each.data), raw_dtype=raw)
    most = max(sizes, key=lambda name: sizes[name])
    writer.add_file_type(LlamaFileType[FILE_TYPES.get(most, f"MOSTLY_{most}")])
    writer.add_quantization_version(GGML_QUANT_VERSION)
    if tokenizer:
        add_tokenizer(writer, like, model.config.vocab_size)
    else:
        writer.add_tokenizer_model("none")
    with replacing(out, error=ExportError) as temporary:
        try:
            writer.write_header_to_file(temporary)
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
        finally:
            writer.close()
