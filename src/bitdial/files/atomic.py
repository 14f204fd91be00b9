"""Files that appear whole or not at all, and JSON in them."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from bitdial.errors import BitdialError, ConfigError


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


def check_target(name: str, path: Path, example: str = "file.json") -> None:
    """Raise ConfigError unless a file can be written at `path`: for long work before that. `example` names one."""
    if os.path.isdir(path):
        raise ConfigError(f"{name} {path}: this is a folder; name a file in it, such as {path / example}")
    check_folder(name, path.parent)


def write_json(path: str | os.PathLike[str], values: Any) -> None:
    """Write JSON `values` to `path` atomically; BitdialError if that fails."""
    with replacing(Path(path), error=BitdialError) as temporary:
        temporary.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def read_json(path: str | os.PathLike[str]) -> Any:
    """The JSON values in the file at `path`; ConfigError names it and what is wrong."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=_once)
    except OSError as problem:
        raise ConfigError(f"cannot read {path}: {problem.strerror}") from problem
    except (ValueError, RecursionError) as problem:
        raise ConfigError(f"{path} is not a JSON file: {problem}") from problem


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; ValueError if it has a key twice, of which Python would take the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"it has {next(name for name in names if names.count(name) > 1)!r} twice")
    return found


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
