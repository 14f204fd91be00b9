"""One writer at a time, with real processes: who is told what, and that a killed one leaves nothing held."""

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE, Popen

import pytest

from bitdial.errors import CheckpointError, ConfigError
from bitdial.files.lock import sole_writer

HOLD = """
import sys
from bitdial.files.lock import sole_writer
with sole_writer(sys.argv[1], work="a long task"):
    print("held", flush=True)
    sys.stdin.readline()
"""


@contextmanager
def another_process(path: Path) -> Iterator[Popen[str]]:
    """One that holds the lock of `path` until it reads a line."""
    with Popen([sys.executable, "-c", HOLD, str(path)], stdin=PIPE, stdout=PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def test_a_second_process_is_told_who_writes(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file.json"
    with another_process(path) as process:
        for error in (ConfigError, CheckpointError):
            words = rf"file\.json is being written by process {process.pid} \(a long task, since .*\); wait for it"
            with pytest.raises(error, match=words), sole_writer(path, work="mine", error=error):
                pytest.fail("both write")
        with sole_writer(tmp_path / "new" / "other.json", work="mine"):
            pass  # another file of the folder is free
        process.communicate("done\n", timeout=60)
        with sole_writer(path, work="mine"):
            path.write_text("{}")
    assert [p.name for p in path.parent.iterdir()] == ["file.json"]


def test_a_killed_process_leaves_nothing_held(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    with another_process(path) as process:
        os.kill(process.pid, signal.SIGKILL)
        process.wait(timeout=60)
    assert list(tmp_path.iterdir()), "what it left behind must not matter"
    with sole_writer(path, work="mine"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_second_thread_is_told_too(tmp_path: Path) -> None:
    said: list[str] = []

    def attempt() -> None:
        try:
            with sole_writer(tmp_path / "file", work="mine"):
                pass
        except ConfigError as problem:
            said.append(str(problem))

    with sole_writer(tmp_path / "file", work="theirs"):
        thread = threading.Thread(target=attempt)
        thread.start()
        thread.join()
    assert f"process {os.getpid()} (theirs" in said[0]


@pytest.mark.parametrize("note", ["", "{}", "[1]", '{"process": 1'])
def test_a_note_that_cannot_be_read_is_no_problem(tmp_path: Path, note: str) -> None:
    with sole_writer(tmp_path / "file", work="x"):
        (tmp_path / ".file.writer").write_text(note)
        with pytest.raises(ConfigError, match="by another process;"), sole_writer(tmp_path / "file", work="y"):
            pass


def test_another_machine_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with sole_writer(tmp_path / "file", work="x"):
        monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
        with pytest.raises(ConfigError, match=r"process \d+ on \S+ \(x"), sole_writer(tmp_path / "file", work="y"):
            pass


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write in .*file: "), sole_writer(tmp_path / "file" / "x", work="x"):
        pytest.fail("there is no such place")

    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fail)
    with pytest.raises(ConfigError, match="No space left on device"), sole_writer(tmp_path / "x", work="x"):
        pytest.fail("there is no space")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
