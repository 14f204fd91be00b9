"""Kernels compiled for an H200 on a machine without one."""

import functools
import importlib.util
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bitdial.kernels import dispatch

INTERPRETED = dispatch.interpreted()
POINTERS = {
    torch.float64: "*fp64", torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16",
    torch.int64: "*i64", torch.int32: "*i32", torch.int8: "*i8", torch.uint8: "*u8",
}  # fmt: skip


@dataclass(frozen=True)
class Compiled:
    """What a launch was compiled to."""

    name: str
    ptx: str
    shared: int

    @functools.cached_property
    def spilled(self) -> int:
        """Bytes of registers that did not fit, as NVIDIA's assembler counts them."""
        import triton

        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "kernel.ptx"
            file.write_text(self.ptx)
            assembler = triton.knobs.nvidia.ptxas.path
            command = [assembler, "-v", "--gpu-name=sm_90a", str(file), "-o", str(file.with_suffix(".cubin"))]
            said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        (spilled,) = re.findall(r"(\d+) bytes spill stores", said)
        return int(spilled)

    def loop(self) -> str:
        """The body of the kernel's only loop: from the label that is jumped back to up to the jump."""
        jumps = [(label, m.start()) for m in re.finditer(r"bra(?:\.uni)?\s+(\$\S+);", self.ptx) for label in [m[1]]]
        back = [(self.ptx.index(f"{label}:"), at) for label, at in jumps if self.ptx.index(f"{label}:") < at]
        assert len(back) == 1
        return self.ptx[slice(*back[0])]

    def count(self, pattern: str, *, in_loop: bool = False) -> int:
        """How often `pattern` is in the assembly."""
        return len(re.findall(pattern, self.loop() if in_loop else self.ptx))


@dataclass
class Compilations:
    """What the launches of a test were compiled to, in their order; by a kernel's name, its last."""

    launches: list[Compiled] = field(default_factory=list)

    def __iter__(self) -> Iterator[Compiled]:
        return iter(self.launches)

    def __len__(self) -> int:
        return len(self.launches)

    def __getitem__(self, name: str) -> Compiled:
        return [launch for launch in self.launches if launch.name == name][-1]

    def __contains__(self, name: str) -> bool:
        return any(launch.name == name for launch in self.launches)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Compilations:
    """What was compiled so far: a launch compiles for an H200, and leaves outputs as they are.

    The interpreter runs kernels by their values and does not know their types: what it accepts need not compile.
    """
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    if torch.cuda.is_available() or INTERPRETED:
        pytest.skip("here kernels are compiled to be run, or not at all")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.jit import JITFunction

    found = Compilations()
    done: dict[Any, Compiled] = {}

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **settings: Any) -> None:
        given = dict(zip(self.arg_names, args, strict=False)) | settings
        options = {name: value for name, value in settings.items() if name not in self.arg_names}
        fixed = {p.name for p in self.params if p.is_constexpr or given[p.name] is None}
        constants = {(p.num,): given[p.name] for p in self.params if p.name in fixed}
        types = {p.name: "constexpr" if p.name in fixed else type_of(given[p.name]) for p in self.params}
        even = [p for p in self.params if p.name not in fixed and is_even(given[p.name])]
        attributes = {(p.num,): [["tt.divisibility", 16]] for p in even}
        key = (self.__name__, *types.items(), *constants.items(), *options.items(), *attributes)
        if key not in done:
            source = ASTSource(self, types, constants, attributes)
            made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
            done[key] = Compiled(self.__name__, made.asm["ptx"], made.metadata.shared)
        found.launches.append(done[key])

    monkeypatch.setattr(JITFunction, "run", compile_only)
    monkeypatch.setattr(dispatch, "interpreted", lambda: True)  # kernels serve tensors on the CPU
    return found


def type_of(value: object) -> str:
    if isinstance(value, Tensor):
        return POINTERS[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def is_even(value: object) -> bool:
    """Whether Triton takes a tensor's address, or a number, for a multiple of 16; PyTorch's memory is aligned."""
    return isinstance(value, Tensor) or (type(value) is int and value % 16 == 0)
