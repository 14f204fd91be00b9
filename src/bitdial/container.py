"""The file under artifacts and checkpoints: one .safetensors file with a JSON manifest and a digest.

The metadata has exactly two entries, `manifest` (JSON text) and `digest`:

    digest = sha256( manifest text
                     then for each tensor, sorted by name: "\\n" name " " dtype " " shape "\\n" data )

with shape written as `2x3` (empty for a scalar), dtype as safetensors spells it and data the tensor's bytes, row-major
and little-endian. A file whose digest does not hold is refused whole. Writing goes to a temporary file beside the
target, which then replaces it: a reader sees the old file or the new one, never a part. Nothing is ever unpickled.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor

from bitdial.errors import BitdialError, ConfigError

_DTYPES: dict[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}

_MOST_LEVELS = 900


def write_container(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    manifest: dict[str, Any],
    *,
    error: type[BitdialError],
) -> str:
    """Write `tensors` and `manifest` (JSON values) to `path` atomically and return the digest.

    A failure raises `error` and leaves what was at `path` alone.
    """
    path = Path(path)
    if unknown := [f"{n!r} ({t.dtype})" for n, t in tensors.items() if t.dtype not in _DTYPES]:
        raise error(f"cannot write {path}: bitdial does not store tensors of the type of {unknown[0]}")
    if "__metadata__" in tensors:
        raise error(f"cannot write {path}: '__metadata__' is a reserved name")
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    try:
        text = json.dumps(manifest, separators=(",", ":"), allow_nan=False)
        metadata = {"manifest": text, "digest": _digest(text, plain)}
    except (TypeError, ValueError) as cause:
        raise error(f"cannot write {path}: {cause}") from cause
    with replacing(path, error=error) as temporary:
        save_file(plain, temporary, metadata)
    return metadata["digest"]


@contextmanager
def replacing(path: Path, *, error: type[BitdialError]) -> Iterator[Path]:
    """Write a file atomically: the block fills the temporary path that it is given, which then replaces `path`.

    A failure to write raises `error`, removes the temporary file and leaves what was at `path` alone.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.touch()
        mode = temporary.stat().st_mode  # as the user's umask has it; safetensors would leave the file private
        yield temporary
        temporary.chmod(mode)
        _flush(temporary)
        os.replace(temporary, path)
    except (OSError, SafetensorError) as cause:
        raise error(f"cannot write {path}: {cause}; what was there before is untouched") from cause
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
    with suppress(OSError):  # the file is in place; not every file system can flush a folder
        _flush(path.parent)


def check_folder(name: str, folder: Path) -> None:
    """Raise ConfigError unless files can be written in `folder`, which need not be there: for long work before that."""
    place = next((p for p in (folder, *folder.parents) if os.path.lexists(p)), Path())
    if not os.path.isdir(place):
        raise ConfigError(f"{name} {folder}: {place} is not a folder; choose another place")
    if not os.access(place, os.W_OK | os.X_OK):
        raise ConfigError(f"{name} {folder}: you may not write in {place}; choose another place")


def check_target(name: str, path: Path) -> None:
    """Raise ConfigError unless a file can be written at `path`: for long work before that."""
    if os.path.isdir(path):
        raise ConfigError(f"{name} {path}: this is a folder; name a file, such as {path / 'file.json'}")
    check_folder(name, path.parent)


def write_json(path: str | os.PathLike[str], values: Any) -> None:
    """Write JSON `values` to `path` atomically; BitdialError if that fails."""
    with replacing(Path(path), error=BitdialError) as temporary:
        temporary.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def read_json(path: str | os.PathLike[str]) -> Any:
    """The JSON values in the file at `path`; ConfigError names it and what is wrong."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as problem:
        raise ConfigError(f"cannot read {path}: {problem.strerror}") from problem
    except (ValueError, RecursionError) as problem:
        raise ConfigError(f"{path} is not a JSON file: {problem}") from problem


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_container(
    path: str | os.PathLike[str], *, error: type[BitdialError]
) -> tuple[dict[str, Tensor], dict[str, Any], str]:
    """The tensors, the manifest and the digest of the file at `path`, checked; `error` if anything is off."""
    path = Path(path)
    try:
        data = path.read_bytes()  # in one go: the file may be replaced at any time
    except (FileNotFoundError, IsADirectoryError) as cause:
        raise error(f"there is no file {path}") from cause
    except OSError as cause:
        raise error(f"cannot read {path}: {cause.strerror}") from cause
    try:
        tensors = load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        metadata = header.get("__metadata__", {})
    except (SafetensorError, ValueError, RuntimeError, AttributeError, KeyError, TypeError) as cause:
        raise error(f"{path} is not a readable safetensors file (truncated or damaged?): {cause}") from cause
    if set(metadata) != {"manifest", "digest"}:
        raise error(f"{path} was not written by bitdial: its metadata lacks 'manifest' and 'digest'")
    text, digest = metadata["manifest"], metadata["digest"]
    if unknown := [n for n, t in tensors.items() if t.dtype not in _DTYPES]:
        raise error(f"{path}: tensor {unknown[0]!r} has a type that bitdial does not write")
    if _digest(text, tensors) != digest:
        raise error(f"{path} is damaged: its content does not match its digest; get a fresh copy")
    try:
        manifest = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as cause:
        raise error(f"{path}: its manifest is not JSON: {cause}") from cause
    if not isinstance(manifest, dict) or _deeper_than(_MOST_LEVELS, manifest):
        raise error(f"{path}: its manifest must be a JSON object of at most {_MOST_LEVELS} levels")
    return tensors, manifest, digest


def _deeper_than(levels: int, value: object) -> bool:
    """Whether lists and objects nest deeper than `levels`; what Python itself can parse depends on its version."""
    level = [value]
    for _ in range(levels):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return False
    return True


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    total = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        shape = "x".join(map(str, tensor.shape))
        total.update(f"\n{name} {_DTYPES[tensor.dtype]} {shape}\n".encode())
        if tensor.numel():
            total.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()
