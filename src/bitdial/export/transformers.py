"""Folders as transformers has them: `config.json` beside the artifact.

Files from elsewhere are hostile here too. The architecture is built by transformers' own classes from `config.json`,
first without memory; nothing is downloaded, and settings that would fetch or run code are dropped.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bitdial.artifact import Artifact, fit, read_artifact
from bitdial.dial.dial import set_bits
from bitdial.dial.plan import BitPlan, LayerBits
from bitdial.errors import ArtifactError, BitdialError, ExportError
from bitdial.export.transformers_folder import (
    ARTIFACT,
    BITS_ENTRY,
    CONFIG,
    GENERATION,
    LEFT_OUT,
    WEIGHTS,
    WEIGHTS_ENTRY,
    check_float,
    checked_artifact,
    copy_file,
    describing,
    import_transformers,
    json_object,
    set_as_stored,
    settings_in,
    settings_of,
    weights_in,
    write_settings,
)
from bitdial.export.transformers_folder import own_type as type_named_in
from bitdial.export.transformers_live import as_pretrained
from bitdial.export.transformers_quantizer import DEPTHS, quantizer_for
from bitdial.live.load import load_into
from bitdial.live.skeleton import NoInitialValues

AUTO_CLASSES = (
    "AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM", "AutoModelForSequenceClassification",
    "AutoModelForTokenClassification", "AutoModelForQuestionAnswering", "AutoModelForMultipleChoice",
    "AutoModelForImageClassification", "AutoModelForAudioClassification", "AutoModelForCTC",
    "AutoModelForSpeechSeq2Seq", "AutoModelForImageTextToText", "AutoModel",
)  # fmt: skip
# Settings that make transformers load code or weights from elsewhere, or that are about another place.
DROPPED = ("auto_map", "attn_implementation", "experts_implementation", "custom_pipelines", "quantization_config",
           WEIGHTS_ENTRY)  # fmt: skip


# --- writing --------------------------------------------------------------------------------------


def export_pretrained(
    path: str | os.PathLike[str], folder: str | os.PathLike[str], like: nn.Module | str | os.PathLike[str]
) -> Path:
    """Write the artifact at `path` as a folder for `from_pretrained` and `load_pretrained`; returns the folder.

    `like` is the transformers model that the artifact was made from, or a folder that holds it. Its config and
    generation config go along, and from a folder the tokenizer's files as well. The folder to write is another one.
    """
    path, folder = Path(path), Path(folder)
    artifact = read_artifact(path)
    settings, generation, files = settings_of(like) if isinstance(like, nn.Module) else settings_in(Path(like))
    check_float(settings.get("quantization_config"))
    settings = describing(artifact, settings, artifact.bit_choices[0])
    if not isinstance(like, nn.Module):
        own = folder / WEIGHTS
        if own.exists() and not own.samefile(path) and folder.resolve() == Path(like).resolve():
            raise ExportError(f"{folder} is the folder of the float model, whose weights would be lost; name another")
        if settings.get("model_type") in import_transformers().CONFIG_MAPPING:  # else its code is the user's own
            _check_config(Path(like) / CONFIG, settings, artifact, path.name)
    target = folder / ARTIFACT
    if not (target.exists() and target.samefile(path)):
        copy_file(path, target)
    write_settings(folder, settings, generation, files)
    return folder


def write_beside(folder: Path, like: Path, described: dict[str, Any]) -> None:
    """Put into `folder` what the float model's folder `like` has beside its weights; the config is `described`."""
    settings, generation, files = settings_in(like)
    check_float(settings.get("quantization_config"))
    settings = {k: v for k, v in settings.items() if k not in LEFT_OUT}
    write_settings(folder, {**settings, "quantization_config": described}, generation, files)


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
    """A live model from a folder that `export_pretrained` or `save_pretrained` wrote, set to `bits`.

    `bits` is by default what the folder names: the highest width, or what the model was set to when it was saved.
    transformers builds the architecture; nothing is downloaded and no code of the folder is run. `dtype` is by default
    the config's, if that is bfloat16 or float16 and the model is weight-only, else float32. The other arguments are
    those of `load`.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ArtifactError(f"there is no folder {folder}")
    settings, file = json_object(folder / CONFIG), weights_in(folder)
    artifact = checked_artifact(file, settings.get("quantization_config"))
    generation = json_object(folder / GENERATION) if (folder / GENERATION).is_file() else None
    model = _build(folder / CONFIG, settings, artifact, file.name)
    if generation is not None and hasattr(model, "generation_config"):
        model.generation_config = import_transformers().GenerationConfig.from_dict(generation)
    dtype = dtype or type_named_in(settings, artifact)
    live = load_into(
        model, artifact, device=device, dtype=dtype, kernels=kernels, bit_choices=bit_choices, master=master
    )
    if bits is None and bit_choices is None:
        set_as_stored(live, settings.get(BITS_ENTRY))
    elif bits is not None:
        set_bits(live, bits)
    as_pretrained(live, quantizer_for(settings["quantization_config"]), file, artifact.digest, dtype)
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
    model = _build(config, json_object(config), artifact, Path(path).name)
    return load_into(model, artifact, device=device, dtype=dtype, kernels=kernels)


def own_type(folder: Path, artifact: Artifact) -> torch.dtype | None:
    """The type that the config in `folder` names, if the model of `artifact` can run in it."""
    return type_named_in(json_object(folder / CONFIG), artifact)


def _build(path: Path, settings: dict[str, Any], artifact: Artifact, file: str) -> nn.Module:
    """The float model of `config.json`, with any weights; tried without memory against the file first."""
    auto, config = _check_config(path, settings, artifact, file)
    with torch.random.fork_rng(), NoInitialValues():
        model: nn.Module = auto.from_config(config, dtype=torch.float32, trust_remote_code=False)
    return model


def _check_config(path: Path, settings: dict[str, Any], artifact: Artifact, file: str) -> tuple[Any, Any]:
    """The auto class and the config by which transformers builds the model of `artifact`, which is in `file`."""
    transformers = import_transformers()
    kind, names = settings.get("model_type"), settings.get("architectures")
    if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
        raise ArtifactError(
            f"{path}: this transformers ({transformers.__version__}) has no model_type {kind!r}; if the model has code "
            f"of its own, build it yourself: load(folder / {file!r}, model)"
        )
    if too_deep := [k for k, v in _walk(settings) if k in DEPTHS and isinstance(v, int) and v > len(artifact.tensors)]:
        raise ArtifactError(f"{path}: {too_deep[0]} is more than the {len(artifact.tensors)} tensors of {file}")
    try:
        config = transformers.CONFIG_MAPPING[kind].from_dict(_harmless(settings))
        auto = _auto_class(config, names)
        if auto is None:
            raise ArtifactError(f"transformers has no architecture {names!r} for model_type {kind!r}")
        with torch.random.fork_rng(), NoInitialValues(), torch.device("meta"):
            fit(artifact, auto.from_config(config, dtype=torch.float32, trust_remote_code=False))
    except BitdialError as problem:
        raise ArtifactError(f"{path} does not fit {file}: {problem}") from problem
    except Exception as problem:  # whatever transformers makes of a config
        raise ArtifactError(f"{path}: transformers cannot build this model: {problem}") from problem
    return auto, config


def _auto_class(config: Any, names: Any) -> Any:
    """The auto class that gives the architecture which the config names; None if none does."""
    transformers = import_transformers()
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
