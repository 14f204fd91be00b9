"""A folder as transformers has it, with an artifact in the place of float weights: its files, and how they are written.

transformers without bitdial must not take such a folder for one of float weights: it would warn and go on with random
ones. So the artifact has a name that transformers does not look for, and `config.json` names, as the file of the
weights, a text that says what is missing. transformers refuses that, and shows it. Registered, bitdial puts the file's
name in its place.
"""

import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bitdial.artifact import Artifact, read_artifact
from bitdial.dial.dial import get_bits, resolve_plan, set_bits
from bitdial.dial.plan import BitPlan
from bitdial.errors import ArtifactError, ConfigError, ExportError, MissingDependencyError, PlanError
from bitdial.files.atomic import read_json, replacing, write_json
from bitdial.kernels.packed_ops import DTYPES

CONFIG, ARTIFACT, GENERATION = "config.json", "bitdial.safetensors", "generation_config.json"
WEIGHTS = "model.safetensors"  # what transformers looks for; earlier versions put the artifact there
METHOD = "bitdial"
WEIGHTS_ENTRY = "transformers_weights"  # by which a config names the file of the weights
GUARD = (
    "these weights are bitdial's. Install it (pip install 'bitdial[hf]') and `import bitdial` before from_pretrained, "
    "or use bitdial.load_pretrained"
)
BITS_ENTRY = "bits"  # what a folder's model is set to when it has been read
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "chat_template.jinja",
    "chat_template.json", "preprocessor_config.json", "processor_config.json",
)  # fmt: skip
# What a folder's config does not take over: a place on this machine, perhaps, and what the float model was read from.
LEFT_OUT = ("_name_or_path", "quantization_config", WEIGHTS_ENTRY, BITS_ENTRY)


# --- its content ----------------------------------------------------------------------------------


def weights_in(folder: Path) -> Path:
    """The file of the artifact in `folder`, whether it is there or not."""
    return folder / (WEIGHTS if (folder / WEIGHTS).exists() and not (folder / ARTIFACT).exists() else ARTIFACT)


def checked_artifact(file: Path, described: Any) -> Artifact:
    """The artifact of a folder whose config describes it so; ArtifactError unless it is that one."""
    config = file.parent / CONFIG
    if not isinstance(described, dict) or described.get("quant_method") != METHOD:
        method = described.get("quant_method") if isinstance(described, dict) else None
        found = f"that of {method!r}" if method else "none"
        raise ArtifactError(f"{config} has no quantization_config of bitdial ({found}); export_pretrained writes one")
    artifact = read_artifact(file)
    if described != describe(artifact):
        raise ArtifactError(
            f"{config} describes {described}, {file.name} holds {describe(artifact)}; are they of two models?"
        )
    return artifact


def describe(artifact: Artifact) -> dict[str, Any]:
    """What the config of its folder says of an artifact."""
    return {
        "quant_method": METHOD,
        "format_version": artifact.manifest["version"],
        "scheme": artifact.scheme,
        "bit_choices": list(artifact.bit_choices),
    }


def own_type(settings: dict[str, Any], artifact: Artifact) -> torch.dtype | None:
    """The type that a config names, if the model of `artifact` can run in it."""
    name = settings.get("dtype", settings.get("torch_dtype"))
    weight_only = all(entry["activations"] == "float" for entry in artifact.layers.values())
    return next((t for t in DTYPES if weight_only and str(t) == f"torch.{name}"), None)


def set_as_stored(live: nn.Module, stored: Any) -> None:
    """Set `live` to the `bits` of a config; None leaves it at its highest width."""
    if isinstance(stored, dict):
        stored = BitPlan.from_dict(stored)
    if stored is not None:
        set_bits(live, tuple(stored) if isinstance(stored, list) else stored)


def bits_to_store(live: nn.Module, artifact: Artifact) -> int | str | dict[str, Any]:
    """What `live` is set to, for a config: a width or the name of a stored plan if one says it, else a whole plan."""
    now = get_bits(live)
    settings: tuple[int | str, ...] = (*artifact.bit_choices, *artifact.plans)
    for setting in settings:
        with suppress(PlanError):  # a live model may offer fewer widths than its file
            if resolve_plan(live, setting) == dict(now):
                return setting
    return now.to_dict()


def json_object(path: Path) -> dict[str, Any]:
    """The JSON object in the file at `path`."""
    try:
        values = read_json(path)
    except ConfigError as problem:
        raise ArtifactError(str(problem)) from problem
    if not isinstance(values, dict):
        raise ArtifactError(f"{path} is not a JSON object")
    return values


def import_transformers() -> Any:
    """The package, or an error that names the extra."""
    try:
        import transformers
    except ImportError as problem:
        raise MissingDependencyError.missing("hf", "transformers") from problem
    return transformers


# --- writing it -----------------------------------------------------------------------------------


def describing(artifact: Artifact, settings: dict[str, Any], bits: int | str | dict[str, Any]) -> dict[str, Any]:
    """The config `settings` of a model as that of a folder with `artifact`, which is to be read at `bits`."""
    dtype = own_type(settings, artifact) or torch.float32
    kept = {key: value for key, value in settings.items() if key not in (*LEFT_OUT, "torch_dtype")}
    return kept | {
        "dtype": str(dtype).removeprefix("torch."),
        WEIGHTS_ENTRY: GUARD,
        BITS_ENTRY: bits,
        "quantization_config": describe(artifact),
    }


def write_settings(
    folder: Path, settings: dict[str, Any], generation: dict[str, Any] | None, files: list[Path]
) -> None:
    """Write `config.json`, in transformers' order, and last: a folder without it is none."""
    for file in files:
        if file.resolve() != (folder / file.name).resolve():
            copy_file(file, folder / file.name)
    if generation is not None:
        write_json(folder / GENERATION, generation)
    write_json(folder / CONFIG, dict(sorted(settings.items())))


def check_float(described: Any) -> None:
    """Refuse a config that describes quantised weights; a GGUF file's are float once transformers has read them."""
    if described and not (isinstance(described, dict) and described.get("quant_method") == "gguf"):
        raise ExportError("the config has a quantization_config already; give that of the float model")


def settings_of(model: nn.Module) -> tuple[dict[str, Any], dict[str, Any] | None, list[Path]]:
    """The config of a model, its generation config, and no further files."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_json_string"):
        raise ConfigError(f"a {type(model).__name__} has no transformers config; give a transformers model or a folder")
    settings = {**json.loads(config.to_json_string()), "architectures": [type(model).__name__]}
    if getattr(model, "quantization_method", None) == METHOD:
        settings.pop("quantization_config", None)
    generation: Any = getattr(model, "generation_config", None)
    return settings, None if generation is None else json.loads(generation.to_json_string()), []


def settings_in(folder: Path) -> tuple[dict[str, Any], dict[str, Any] | None, list[Path]]:
    """The config in a folder, its generation config, and its tokenizer's files."""
    generation = json_object(folder / GENERATION) if (folder / GENERATION).is_file() else None
    files = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
    return json_object(folder / CONFIG), generation, files


def copy_file(source: Path, target: Path) -> None:
    """Copy a file; `target` is replaced whole."""
    with replacing(target, error=ExportError) as temporary:
        shutil.copyfile(source, temporary)
