"""One process at a time makes a file: a lock that ends with the process that holds it."""

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from bitdial.errors import BitdialError, ConfigError

_TRIES = 20  # a lock file that its holder removes at the same moment is taken anew


@contextmanager
def sole_writer(path: str | os.PathLike[str], *, work: str, error: type[BitdialError] = ConfigError) -> Iterator[None]:
    """Keep the file at `path` to this process inside the block; `error` at once if it cannot be written, or another is.

    `work` says in a few words what happens meanwhile; the other process is told it. Everything is beside `path`: the
    lock, which is the system's and so never outlives its process, and a note on who holds it. Both are removed.
    """
    path = Path(path)
    place, note = path.with_name(f".{path.name}.lock"), path.with_name(f".{path.name}.writer")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = _take(place)
        if lock is None:
            raise error(f"{path} is being written by {_holder(note)}; wait for it, end it, or choose another place")
        holder = {"process": os.getpid(), "host": socket.gethostname(), "since": _now(), "work": work}
        try:
            note.write_text(json.dumps(holder))
        except OSError:
            _give_back(lock, place, note)
            raise
    except OSError as cause:
        raise error(f"cannot write in {path.parent}: {cause.strerror or cause}; choose another place") from cause
    try:
        yield
    finally:
        _give_back(lock, place, note)


def _take(place: Path) -> FileLock | None:
    """The lock at `place`, or None while another holds it."""
    for _ in range(_TRIES):
        place.touch()
        lock, before = FileLock(place, timeout=0), _identity(place)
        try:
            lock.acquire()
        except Timeout:
            if place.exists():
                return None
            continue
        if before is not None and _identity(place) == before:
            return lock
        lock.release()  # that of a file which its last holder has removed meanwhile
    return None


def _identity(place: Path) -> tuple[int, int] | None:
    try:
        found = place.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _give_back(lock: FileLock, place: Path, note: Path) -> None:
    for path in (note, place):
        with suppress(OSError):  # where open files cannot be removed, they stay
            path.unlink(missing_ok=True)
    lock.release()


def _holder(note: Path) -> str:
    """Who holds a lock, as far as its note says."""
    try:
        said = json.loads(note.read_text())
        where = "" if said["host"] == socket.gethostname() else f" on {said['host']}"
        return f"process {said['process']}{where} ({said['work']}, since {said['since']})"
    except (OSError, ValueError, KeyError, TypeError):  # it has just begun, or has just ended
        return "another process"


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")
