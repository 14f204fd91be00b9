"""Folders as transformers has them: `config.json` beside the artifact, which is their `model.safetensors`.

Files from elsewhere are hostile here too. The architecture is built by transformers' own classes from `config.json`,
first without memory; nothing is downloaded, and settings that would fetch or run code are dropped.
"""

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bitdial.artifact import Artifact, fit, read_artifact
from bitdial.dial.dial import set_bits
from bitdial.dial.plan import BitPlan, LayerBits
from bitdial.errors import ArtifactError, BitdialError, ConfigError, ExportError, MissingDependencyError
from bitdial.files.atomic import read_json, replacing, write_json
from bitdial.kernels.packed_ops import DTYPES
from bitdial.live.load import load_into
from bitdial.live.skeleton import NoInitialValues

CONFIG, WEIGHTS, GENERATION = "config.json", "model.safetensors", "generation_config.json"
METHOD = "bitdial"
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "chat_template.jinja",
    "chat_template.json", "preprocessor_config.json", "processor_config.json",
)  # fmt: skip
AUTO_CLASSES = (
    "AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM", "AutoModelForSequenceClassification",
    "AutoModelForTokenClassification", "AutoModelForQuestionAnswering", "AutoModelForMultipleChoice",
    "AutoModelForImageClassification", "AutoModelForAudioClassification", "AutoModelForCTC",
    "AutoModelForSpeechSeq2Seq", "AutoModelForImageTextToText", "AutoModel",
)  # fmt: skip
# Settings that make transformers load code or weights from elsewhere, or that are about another place.
DROPPED = ("auto_map", "attn_implementation", "experts_implementation", "custom_pipelines", "quantization_config")
# What a folder's config does not take over: a place on this machine, perhaps, and what the float model was read from.
LEFT_OUT = ("_name_or_path", "quantization_config")
DEPTHS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers", "depth")


# --- writing --------------------------------------------------------------------------------------


def export_pretrained(
    path: str | os.PathLike[str], folder: str | os.PathLike[str], like: nn.Module | str | os.PathLike[str]
) -> Path:
    """Write the artifact at `path` as a folder that `load_pretrained` reads; returns the folder.

    `like` is the transformers model that the artifact was made from, or a folder that holds it. Its config and
    generation config go along, and from a folder the tokenizer's files as well. The folder to write is another one.
    """
    path, folder = Path(path), Path(folder)
    artifact = read_artifact(path)
    settings, generation, files = _settings_of(like) if isinstance(like, nn.Module) else _settings_in(Path(like))
    _check_float(settings.get("quantization_config"))
    settings = {k: v for k, v in settings.items() if k not in LEFT_OUT}
    target = folder / WEIGHTS
    there = target.exists() and target.samefile(path)
    if not isinstance(like, nn.Module):
        if target.exists() and not there and folder.resolve() == Path(like).resolve():
            raise ExportError(f"{folder} is the folder of the float model, whose weights would be lost; name another")
        if settings.get("model_type") in _transformers().CONFIG_MAPPING:  # else its code is the user's own
            _check_config(Path(like) / CONFIG, settings, artifact)
    if not there:
        _copy(path, target)
    _write_settings(folder, settings, generation, files, _describe(artifact))
    return folder


def write_beside(folder: Path, like: Path, described: dict[str, Any]) -> None:
    """Put into `folder` what the float model's folder `like` has beside its weights; the config is `described`."""
    settings, generation, files = _settings_in(like)
    _check_float(settings.get("quantization_config"))
    settings = {k: v for k, v in settings.items() if k not in LEFT_OUT}
    _write_settings(folder, settings, generation, files, described)


def _write_settings(
    folder: Path,
    settings: dict[str, Any],
    generation: dict[str, Any] | None,
    files: list[Path],
    described: dict[str, Any],
) -> None:
    for file in files:
        if file.resolve() != (folder / file.name).resolve():
            _copy(file, folder / file.name)
    if generation is not None:
        write_json(folder / GENERATION, generation)
    write_json(folder / CONFIG, {**settings, "quantization_config": described})


def _check_float(described: Any) -> None:
    """Refuse a config that describes quantised weights; a GGUF file's are float once transformers has read them."""
    if described and not (isinstance(described, dict) and described.get("quant_method") == "gguf"):
        raise ExportError("the config has a quantization_config already; give that of the float model")


def _describe(artifact: Artifact) -> dict[str, Any]:
    return {
        "quant_method": METHOD,
        "format_version": artifact.manifest["version"],
        "scheme": artifact.scheme,
        "bit_choices": list(artifact.bit_choices),
    }


def _settings_of(model: nn.Module) -> tuple[dict[str, Any], dict[str, Any] | None, list[Path]]:
    """The config of a model, its generation config, and no further files."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_json_string"):
        raise ConfigError(f"a {type(model).__name__} has no transformers config; give a transformers model or a folder")
    settings = {**json.loads(config.to_json_string()), "architectures": [type(model).__name__]}
    generation: Any = getattr(model, "generation_config", None)
    return settings, None if generation is None else json.loads(generation.to_json_string()), []


def _settings_in(folder: Path) -> tuple[dict[str, Any], dict[str, Any] | None, list[Path]]:
    """The config in a folder, its generation config, and its tokenizer's files."""
    generation = _json_object(folder / GENERATION) if (folder / GENERATION).is_file() else None
    files = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
    return _json_object(folder / CONFIG), generation, files


def _copy(source: Path, target: Path) -> None:
    with replacing(target, error=ExportError) as temporary:
        shutil.copyfile(source, temporary)


# --- reading --------------------------------------------------------------------------------------


def load_pretrained(
    folder: str | os.PathLike[str],
    *,
    bits: LayerBits | BitPlan | str | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    kernels: str | None = None,
    bit_choices: Sequence[int] | None = None,
    master: str = "device",
) -> nn.Module:
    """A live model from a folder that `export_pretrained` wrote, set to `bits` (default: the highest width).

    transformers builds the architecture; nothing is downloaded and no code of the folder is run. `dtype` is by default
    the config's, if that is bfloat16 or float16 and the model is weight-only, else float32. The other arguments are
    those of `load`.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ArtifactError(f"there is no folder {folder}")
    settings = _json_object(folder / CONFIG)
    described = settings.get("quantization_config")
    if not isinstance(described, dict) or described.get("quant_method") != METHOD:
        method = described.get("quant_method") if isinstance(described, dict) else None
        found = f"that of {method!r}" if method else "none"
        raise ArtifactError(
            f"{folder / CONFIG} has no quantization_config of bitdial ({found}); export_pretrained writes one"
        )
    artifact = read_artifact(folder / WEIGHTS)
    if described != _describe(artifact):
        raise ArtifactError(
            f"{folder / CONFIG} describes {described}, {WEIGHTS} holds {_describe(artifact)}; are they of two models?"
        )
    generation = _json_object(folder / GENERATION) if (folder / GENERATION).is_file() else None
    model = _build(folder / CONFIG, settings, artifact)
    if generation is not None and hasattr(model, "generation_config"):
        model.generation_config = _transformers().GenerationConfig.from_dict(generation)
    live = load_into(
        model, artifact, device=device, dtype=dtype or _own_type(settings, artifact), kernels=kernels,
        bit_choices=bit_choices, master=master,
    )  # fmt: skip
    if bits is not None:
        set_bits(live, bits)
    return live


def load_beside(
    path: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    kernels: str | None = None,
) -> nn.Module:
    """A live model from the artifact at `path`, of the architecture that the transformers `folder` describes.

    Only the folder's `config.json` is read. The other arguments are those of `load`.
    """
    artifact, config = read_artifact(path), Path(folder) / CONFIG
    model = _build(config, _json_object(config), artifact)
    return load_into(model, artifact, device=device, dtype=dtype, kernels=kernels)


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as problem:
        raise MissingDependencyError.missing("hf", "transformers") from problem
    return transformers


def _json_object(path: Path) -> dict[str, Any]:
    try:
        values = read_json(path)
    except ConfigError as problem:
        raise ArtifactError(str(problem)) from problem
    if not isinstance(values, dict):
        raise ArtifactError(f"{path} is not a JSON object")
    return values


def own_type(folder: Path, artifact: Artifact) -> torch.dtype | None:
    """The type that the config in `folder` names, if the model of `artifact` can run in it."""
    return _own_type(_json_object(folder / CONFIG), artifact)


def _own_type(settings: dict[str, Any], artifact: Artifact) -> torch.dtype | None:
    name = settings.get("dtype", settings.get("torch_dtype"))
    weight_only = all(entry["activations"] == "float" for entry in artifact.layers.values())
    return next((t for t in DTYPES if weight_only and str(t) == f"torch.{name}"), None)


def _build(path: Path, settings: dict[str, Any], artifact: Artifact) -> nn.Module:
    """The float model of `config.json`, with any weights; tried without memory against the file first."""
    auto, config = _check_config(path, settings, artifact)
    with torch.random.fork_rng(), NoInitialValues():
        model: nn.Module = auto.from_config(config, dtype=torch.float32, trust_remote_code=False)
    return model


def _check_config(path: Path, settings: dict[str, Any], artifact: Artifact) -> tuple[Any, Any]:
    """The auto class and the config by which transformers builds the model of `artifact`."""
    transformers = _transformers()
    kind, names = settings.get("model_type"), settings.get("architectures")
    if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
        raise ArtifactError(
            f"{path}: this transformers ({transformers.__version__}) has no model_type {kind!r}; if the model has code "
            f"of its own, build it yourself: load(folder / {WEIGHTS!r}, model)"
        )
    if too_deep := [k for k, v in _walk(settings) if k in DEPTHS and isinstance(v, int) and v > len(artifact.tensors)]:
        raise ArtifactError(f"{path}: {too_deep[0]} is more than the {len(artifact.tensors)} tensors of {WEIGHTS}")
    try:
        config = transformers.CONFIG_MAPPING[kind].from_dict(_harmless(settings))
        auto = _auto_class(config, names)
        if auto is None:
            raise ArtifactError(f"transformers has no architecture {names!r} for model_type {kind!r}")
        with torch.random.fork_rng(), NoInitialValues(), torch.device("meta"):
            fit(artifact, auto.from_config(config, dtype=torch.float32, trust_remote_code=False))
    except BitdialError as problem:
        raise ArtifactError(f"{path} does not fit {WEIGHTS}: {problem}") from problem
    except Exception as problem:  # whatever transformers makes of a config
        raise ArtifactError(f"{path}: transformers cannot build this model: {problem}") from problem
    return auto, config


def _auto_class(config: Any, names: Any) -> Any:
    """The auto class that gives the architecture which the config names; None if none does."""
    transformers = _transformers()
    for name in AUTO_CLASSES:
        auto = getattr(transformers, name)
        mapping = auto._model_mapping
        if type(config) in mapping and isinstance(names, list) and names:
            found = mapping[type(config)]
            if names[0] in [c.__name__ for c in (found if isinstance(found, tuple) else (found,))]:
                return auto
    return None


def _walk(settings: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        yield key, value
        if isinstance(value, dict):
            yield from _walk(value)


def _harmless(settings: dict[str, Any]) -> dict[str, Any]:
    """`settings` without what would load something from elsewhere, at any depth."""
    kept = {k: v for k, v in settings.items() if k not in DROPPED and not k.startswith("_")}
    kept = {k: _harmless(v) if isinstance(v, dict) else v for k, v in kept.items()}
    return kept | ({"use_pretrained_backbone": False} if "backbone" in kept else {})
