"""A process of the command line keeps freed memory; one that only imports it does not."""

import ctypes
import os
import platform
import subprocess
import sys

import pytest

from bitdial.cli import allocator, entry

TAKES = 64 * 2**20  # bytes, beyond what glibc keeps by itself
MEASURED = f"""
import ctypes, os, resource
from bitdial.cli.allocator import keep_freed_memory
keep_freed_memory()
c = ctypes.CDLL(None)
c.malloc.restype, c.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
for _ in range(20):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = c.malloc({TAKES})
    ctypes.memset(block, 1, {TAKES})
    c.free(block)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(**variables: str) -> int:
    """Pages that the system gave for the last of 20 blocks."""
    env = {name: value for name, value in os.environ.items() if name not in allocator.SETTINGS}
    ended = subprocess.run(
        [sys.executable, "-c", MEASURED], env={**env, **variables}, capture_output=True, text=True, check=True
    )
    return int(ended.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator is meant")
def test_freed_memory_serves_again_unless_the_user_has_set_it() -> None:
    pages = TAKES // os.sysconf("SC_PAGESIZE")
    assert faults() < pages / 10
    assert faults(MALLOC_MMAP_MAX_="65536", MALLOC_TRIM_THRESHOLD_="131072") > pages / 10 or huge_pages()


def huge_pages() -> bool:
    with open("/sys/kernel/mm/transparent_hugepage/enabled") as file:
        return "[always]" in file.read()


def test_only_a_process_of_its_own_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    class Library:
        @staticmethod
        def mallopt(setting: int, value: int) -> None:
            asked.append((setting, value))

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library)
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.40"))
    for name in allocator.SETTINGS:
        monkeypatch.delenv(name, raising=False)
    assert entry.main(["inspect", "nothing.safetensors"]) == 1
    assert asked == []
    monkeypatch.setattr(sys, "argv", ["bitdial", "inspect", "nothing.safetensors"])
    assert entry.main() == 1
    assert asked == [(-1, -1), (-4, 0)]
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    assert entry.main() == 1
    assert len(asked) == 2, "another allocator"
