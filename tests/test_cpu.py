"""The AMX guard: the parser on sample texts, the variable it sets, and that torch stays out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bitdial import _cpu
from bitdial._cpu import faulty_amx, guard_onednn


def processor(number: int = 0, level: object = 28, flags: str = "fpu sse2 amx_tile") -> str:
    """Return one processor's block in the layout that Linux on x86 prints."""
    return (
        f"processor\t: {number}\n"
        "vendor_id\t: GenuineIntel\n"
        "model name\t: Intel(R) Xeon(R) Processor: virtual\n"
        "fpu_exception\t: yes\n"
        f"cpuid level\t: {level}\n"
        f"flags\t\t: {flags}\n"
        "bugs\t\t: spectre_v1\n"
        "power management:\n\n"
    )


AARCH64 = "processor\t: 0\nBogoMIPS\t: 50.00\nFeatures\t: fp asimd evtstrm\nCPU part\t: 0xd0c\n\n"


@pytest.mark.parametrize("level", [0, 13, 28])
def test_flag_without_the_leaf_is_faulty(level: int) -> None:
    assert faulty_amx(processor(level=level))


@pytest.mark.parametrize("level", [29, 30, 32, 100])
def test_flag_with_the_leaf_is_sound(level: int) -> None:
    assert not faulty_amx(processor(level=level))


@pytest.mark.parametrize("flags", ["", "fpu sse2 avx512_vnni", "amx_tile_other xamx_tile amx_bf16"])
def test_without_the_flag_a_low_level_is_sound(flags: str) -> None:
    assert not faulty_amx(processor(level=13, flags=flags))


def test_one_faulty_processor_among_many_is_enough() -> None:
    sound = processor(0, level=32)
    assert not faulty_amx(sound + processor(1, level=32))
    assert faulty_amx(sound + processor(1, level=28))


def test_fields_of_different_processors_are_not_mixed() -> None:
    assert not faulty_amx(processor(0, level=28, flags="fpu") + processor(1, level=32))


@pytest.mark.parametrize("text", ["", "\n\n\n", "no colon here", AARCH64, processor(level="?")])
def test_unknown_texts_are_sound(text: str) -> None:
    assert not faulty_amx(text)


@pytest.fixture
def cpuinfo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Point the guard at a file that does not exist yet, with the variable unset."""
    path = tmp_path / "cpuinfo"
    monkeypatch.setattr(_cpu, "CPUINFO", path)
    monkeypatch.setenv(_cpu.ISA_VARIABLE, "to be restored")
    monkeypatch.delenv(_cpu.ISA_VARIABLE)
    return path


def test_guard_sets_the_cap_when_faulty(cpuinfo: Path) -> None:
    cpuinfo.write_text(processor(level=28), encoding="utf-8")
    guard_onednn()
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE_FP16"


def test_guard_keeps_the_users_value(cpuinfo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpuinfo.write_text(processor(level=28), encoding="utf-8")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    guard_onednn()
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX2"


def test_guard_leaves_a_sound_machine_alone(cpuinfo: Path) -> None:
    cpuinfo.write_text(processor(level=32), encoding="utf-8")
    guard_onednn()
    assert "ONEDNN_MAX_CPU_ISA" not in os.environ


def test_guard_is_silent_without_the_file(cpuinfo: Path) -> None:
    guard_onednn()
    assert "ONEDNN_MAX_CPU_ISA" not in os.environ


def test_guard_survives_bytes_that_are_not_text(cpuinfo: Path) -> None:
    cpuinfo.write_bytes(b"\xff\xfe\n\n" + processor(level=28).encode())
    guard_onednn()
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE_FP16"


def test_the_file_imports_no_torch() -> None:
    """Run the file by itself, outside the package, in a fresh interpreter."""
    script = "import runpy, sys; runpy.run_path(sys.argv[1]); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script, _cpu.__file__], check=True, timeout=60)
