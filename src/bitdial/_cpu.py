"""Keep oneDNN away from AMX instructions that the processor announces but cannot run.

Some virtual machines pass the AMX flags through to the guest and hide CPUID leaf 29 (0x1D),
which describes the tiles. oneDNN believes the flags, and the first bf16 matmul ends the process
with SIGILL. Capping oneDNN one instruction set below AMX avoids this. oneDNN reads the cap once,
at its first operation, so ``guard_onednn`` must run before that; this file does not import torch.
"""

from __future__ import annotations

import os
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
ISA_VARIABLE = "ONEDNN_MAX_CPU_ISA"
ISA_BELOW_AMX = "AVX512_CORE_FP16"
TILE_LEAF = 29


def faulty_amx(cpuinfo: str) -> bool:
    """Tell whether ``/proc/cpuinfo`` text shows a processor with AMX flags but no tile leaf.

    Faulty: ``amx_tile`` among the flags and ``cpuid level`` below 29, for any one processor.
    A text without these fields (another architecture, an empty file) is not faulty.
    """
    return any(_faulty_processor(block) for block in cpuinfo.split("\n\n"))


def guard_onednn() -> None:
    """Set ``ONEDNN_MAX_CPU_ISA`` in this process's environment where AMX is faulty.

    A value that the user has set already stays. Does nothing where there is no ``/proc/cpuinfo``.
    """
    try:
        cpuinfo = CPUINFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    if faulty_amx(cpuinfo):
        os.environ.setdefault(ISA_VARIABLE, ISA_BELOW_AMX)


def _faulty_processor(block: str) -> bool:
    """Tell whether one processor's lines (``name : value``) show AMX without its leaf."""
    fields: dict[str, str] = {}
    for line in block.splitlines():
        name, _, value = line.partition(":")
        fields[name.strip()] = value.strip()
    level = fields.get("cpuid level", "")
    has_flag = "amx_tile" in fields.get("flags", "").split()
    return has_flag and level.isdecimal() and int(level) < TILE_LEAF
