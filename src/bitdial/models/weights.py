"""Float weights from a safetensors file into a model, all of them or none."""

import json
import os
import zipfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from bitdial.errors import ConfigError


@dataclass(frozen=True)
class WeightsMetadata:
    """What the metadata of a file say: which of our models it is of, and how images become inputs.

    `model` and `images` (see images.ImageSettings) are None, and `arguments` are empty, where they say nothing.
    """

    path: Path
    model: str | None
    arguments: dict[str, Any]
    images: Any


@dataclass(frozen=True)
class WeightsFile:
    """The tensors of a file, and what its metadata say."""

    metadata: WeightsMetadata
    tensors: dict[str, Tensor]


def read_metadata(path: str | os.PathLike[str]) -> WeightsMetadata:
    """What the metadata of a safetensors file of weights say; ConfigError, with a way out, for any other file."""
    with _opened(Path(path)) as content:
        return _metadata(Path(path), content)


def read_weights(path: str | os.PathLike[str]) -> WeightsFile:
    """The weights in a safetensors file; ConfigError, with a way out, for any other file."""
    with _opened(Path(path)) as content:
        metadata = _metadata(Path(path), content)
        names = content.keys()
        return WeightsFile(metadata, {name: content.get_tensor(name) for name in names})


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, "pt") as content:
            yield content
    except OSError as problem:
        raise ConfigError(f"cannot read {path}: {problem.strerror or problem}") from problem
    except SafetensorError as problem:
        raise ConfigError(_refusal(path, problem)) from problem


def _metadata(path: Path, content: Any) -> WeightsMetadata:
    found = content.metadata() or {}
    if {"manifest", "digest"} <= set(found):
        raise ConfigError(f"{path} is a bitdial artifact, whose layers are integers; give float weights")
    values = {}
    for key in ("arguments", "images"):
        try:
            values[key] = json.loads(found[key]) if key in found else None
        except (ValueError, RecursionError) as problem:
            raise ConfigError(f"{path}: its metadata has {key} that are not JSON: {problem}") from problem
    arguments = {} if values["arguments"] is None else values["arguments"]
    if not isinstance(arguments, dict):
        raise ConfigError(f"{path}: its metadata has arguments that are no JSON object")
    return WeightsMetadata(path, found.get("model"), arguments, values["images"])


def _refusal(path: Path, problem: Exception) -> str:
    """What to say of a file that is not of safetensors."""
    if not _pickled(path):
        return f"{path} is not a safetensors file: {problem}"
    return (
        f"{path} is pickled, and unpickling can run code of its author; make a safetensors file of it: "
        f"safetensors.torch.save_file(torch.load({path.name!r}, weights_only=True), "
        f"{path.with_suffix('.safetensors').name!r}). tools/imagenet_weights.py does so for published weights"
    )


def _pickled(path: Path) -> bool:
    """Whether torch.save wrote the file: in a ZIP archive with a pickle, or, long ago, as one."""
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith("data.pkl") for name in archive.namelist())
    except zipfile.BadZipFile:
        with path.open("rb") as file:
            return file.read(1) == b"\x80"


def fill(model: nn.Module, weights: WeightsFile, name: str, *, keep: Collection[str] = ()) -> None:
    """Put `weights` into `model`, in place; ConfigError, and nothing changed, unless every tensor has its place.

    Those that `keep` names are left as the model has them.
    """
    own: Mapping[str, Tensor] = model.state_dict()
    given = weights.tensors
    problems = [
        f"{key} is {tuple(given[key].shape)} in the file and {tuple(tensor.shape)} in the model"
        for key, tensor in own.items()
        if key in given and given[key].shape != tensor.shape and key not in keep
    ]
    counters = {key for key in own if key.endswith("num_batches_tracked")}  # of norms; files may leave them out
    missing = [key for key in own if key not in given and key not in counters]
    extra = [key for key in given if key not in own]
    problems += [f"the file has no {missing[0]} ({len(missing)} are missing)"] if missing else []
    problems += [f"the model has no {extra[0]} ({len(extra)} are too many)"] if extra else []
    if problems:
        path = weights.metadata.path
        raise ConfigError(f"{path} is not for {name}: {'; '.join(problems[:3])}. Name the model it is of")
    model.load_state_dict({key: tensor for key, tensor in given.items() if key not in keep}, strict=False)
