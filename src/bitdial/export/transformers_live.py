"""What makes a live model one of transformers' own: it knows how it is quantised, and writes its folder again."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bitdial.artifact import read_artifact
from bitdial.dial.dial import unwrap
from bitdial.errors import ArtifactError, ConfigError
from bitdial.export.transformers_folder import (
    ARTIFACT,
    BITS_ENTRY,
    METHOD,
    WEIGHTS_ENTRY,
    bits_to_store,
    copy_file,
    describing,
    settings_of,
    write_settings,
)

# Arguments of `save_pretrained` that are about how float weights are cut into files, and about access.
WITHOUT_EFFECT = ("max_shard_size", "safe_serialization", "save_peft_format", "save_original_format", "token")


def as_pretrained(live: nn.Module, quantizer: Any, file: Path, digest: str, dtype: torch.dtype | None) -> None:
    """Give `live`, made from the artifact in `file`, what transformers expects of a quantised model, in place."""
    model: Any = unwrap(live)
    config = model.config
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        if part is not None:
            part.dtype = dtype or torch.float32
    for entry in (BITS_ENTRY, WEIGHTS_ENTRY):  # they are about reading a folder
        if entry in vars(config):
            delattr(config, entry)
    config.quantization_config = quantizer.quantization_config
    model.hf_quantizer, model.quantization_method, model.is_quantized = quantizer, METHOD, True
    # transformers would write the state of the live layers, over what is there. The file itself is exact.
    model.save_pretrained = partial(save_live, model, file.resolve(), digest)


def save_live(
    live: nn.Module,
    file: Path,
    digest: str,
    save_directory: str | os.PathLike[str],
    is_main_process: bool = True,
    **options: Any,
) -> None:
    """`save_pretrained` of a live model: its folder, with a copy of the `file` that it came from.

    The folder is read at what the model is set to now. What transformers offers beyond that is refused.
    """
    if refused := [name for name, value in options.items() if value and name not in WITHOUT_EFFECT]:
        raise ConfigError(f"save_pretrained({refused[0]}=...) is not for live models, which are saved as a whole")
    if not is_main_process:
        return
    folder, gone = Path(save_directory), f"{file}, of which this model was made, is gone or another one"
    try:
        artifact = read_artifact(file)
    except ArtifactError as problem:
        raise ArtifactError(f"{gone}: {problem}") from problem
    if artifact.digest != digest:
        raise ArtifactError(f"{gone}; save_pretrained needs it, since a live model may hold less")
    settings, generation, _ = settings_of(live)
    target = folder / ARTIFACT
    if target.resolve() != file:
        copy_file(file, target)
    write_settings(folder, describing(artifact, settings, bits_to_store(live, artifact)), generation, [])
