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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor

from bitdial.errors import BitdialError
from bitdial.files.atomic import replacing

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
