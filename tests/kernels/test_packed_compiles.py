"""The kernels of packed weights compile for an H200, without one: wide loads and stores, nothing spilled or shuffled.

Written for the layouts that `triton_linear` and `triton_unpack` count on: where Triton would choose others, weights
would move between threads. The results would still be right, and the kernels slow.
"""

import importlib.util
import os
import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from bitdial.kernels import packed_ops as packed
from bitdial.kernels import weight_pool as arena
from bitdial.kernels.packed_ops import PackedWeight
from bitdial.kernels.weight_pool import PackedArena
from bitdial.kernels.word_layout import nested_fields, packed_fields, words_shape

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="here they are compiled to be run"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"),
]

POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int32: "*i32",
            torch.int64: "*i64"}  # fmt: skip
CHOICES = (8, 6, 4, 3, 2)


class Compiled(NamedTuple):
    """What a launch was compiled to."""

    ptx: str
    shared: int
    spilled: int

    def loop(self) -> str:
        """The body of the kernel's only loop: from the label that is jumped back to up to the jump."""
        jumps = [(label, m.start()) for m in re.finditer(r"bra(?:\.uni)?\s+(\$\S+);", self.ptx) for label in [m[1]]]
        back = [(self.ptx.index(f"{label}:"), at) for label, at in jumps if self.ptx.index(f"{label}:") < at]
        assert len(back) == 1
        return self.ptx[slice(*back[0])]

    def count(self, pattern: str, *, in_loop: bool = False) -> int:
        return len(re.findall(pattern, self.loop() if in_loop else self.ptx))


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Compiled]:
    """By the kernel's name what it was last compiled to; a launch compiles, and leaves outputs as they are."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.jit import JITFunction

    found: dict[str, Compiled] = {}

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **settings: Any) -> None:
        given = dict(zip(self.arg_names, args, strict=False)) | settings
        options = {name: value for name, value in settings.items() if name not in self.arg_names}
        constants = {(p.num,): given[p.name] for p in self.params if p.is_constexpr}
        types = {p.name: "constexpr" if p.is_constexpr else type_of(given[p.name]) for p in self.params}
        even = [p for p in self.params if not p.is_constexpr and divisible(given[p.name])]
        attributes = {(p.num,): [["tt.divisibility", 16]] for p in even}
        source = ASTSource(self, types, constants, attributes)
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        file = tmp_path / "kernel.ptx"
        file.write_text(made.asm["ptx"])
        ptxas = triton.knobs.nvidia.ptxas.path
        command = [ptxas, "-v", "--gpu-name=sm_90a", str(file), "-o", str(tmp_path / "kernel.cubin")]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        (spilled,) = re.findall(r"(\d+) bytes spill stores", said)
        found[self.__name__] = Compiled(made.asm["ptx"], made.metadata.shared, int(spilled))

    monkeypatch.setattr(JITFunction, "run", compile_only)
    for module in (arena, packed):
        monkeypatch.setattr(module, "triton_runs", lambda tensor: True)
    return found


def type_of(value: object) -> str:
    if isinstance(value, Tensor):
        return POINTERS[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def divisible(value: object) -> bool:
    """What Triton looks for before it compiles; buffers of a GPU begin at multiples of 256."""
    return isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0)


def weight(fields: tuple[int, ...], scheme: str, rows: int = 64, columns: int = 4096) -> PackedWeight:
    words = torch.zeros(words_shape(fields, rows, columns), dtype=torch.int32)
    return PackedWeight(name="fc", words=words, scale=torch.ones(rows), columns=columns, fields=fields, high=8,
                        scheme=scheme)  # fmt: skip


@pytest.mark.parametrize("bits", CHOICES)
def test_nested_weights_for_one_token(compiled: dict[str, Compiled], bits: int) -> None:
    weight(nested_fields(CHOICES), "nested").linear(torch.zeros(1, 4096, dtype=torch.bfloat16), bits)
    few = compiled["_few"]
    assert few.spilled == 0
    assert few.count(r"ld\.global\S*\.v4\.b32", in_loop=True) == bits + 8  # the planes; the tokens
    assert few.count(r"mma\.sync", in_loop=True) == 16
    assert few.count(r"shfl|shared|ldmatrix", in_loop=True) == 0


@pytest.mark.parametrize(("bits", "dtype"), [(3, torch.float16), (8, torch.bfloat16), (8, torch.float16)])
def test_rounded_weights_for_sixteen_tokens(compiled: dict[str, Compiled], bits: int, dtype: torch.dtype) -> None:
    bias = torch.zeros(64, dtype=dtype)
    weight(packed_fields(bits), "double_rounding").linear(torch.zeros(16, 4096, dtype=dtype), bits, bias)
    few = compiled["_few"]
    assert few.spilled == 0
    assert few.count(r"ld\.global\S*\.v4\.b32", in_loop=True) == bits + 16  # twice the tokens
    assert few.count(r"shfl|shared|ldmatrix", in_loop=True) == 0
    assert "_add_splits" in compiled


@pytest.mark.parametrize("rows", [8192, 14336])
def test_twice_the_rows_for_sixteen_tokens_at_two_bits(compiled: dict[str, Compiled], rows: int) -> None:
    weight(nested_fields(CHOICES), "nested", rows).linear(torch.zeros(16, 4096, dtype=torch.bfloat16), 2)
    few = compiled["_few"]
    assert few.spilled == 0
    assert few.count(r"ld\.global\S*\.v4\.b32", in_loop=True) == 2 * 2 + 16
    assert few.count(r"shfl|shared|ldmatrix", in_loop=True) == 0
    assert "_add_splits" not in compiled


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("scheme", "bits"), [("nested", 2), ("nested", 8), ("double_rounding", 3)])
def test_many_tokens(compiled: dict[str, Compiled], scheme: str, bits: int, dtype: torch.dtype) -> None:
    fields = nested_fields(CHOICES) if scheme == "nested" else packed_fields(bits)
    weight(fields, scheme).linear(torch.zeros(256, 4096, dtype=dtype), bits, torch.zeros(64, dtype=dtype))
    unpack, finish = compiled["_unpack"], compiled["_scale_sums"]
    for kernel in (unpack, finish):
        assert kernel.spilled == kernel.shared == 0
        assert kernel.count("shfl|bar") == 0
    assert unpack.count("ld.global") == unpack.count(r"ld\.global\S*\.v4\.b32") == bits  # the planes, once
    assert unpack.count("st.global") == unpack.count(r"st\.global\S*\.v4\.b32") == 16  # 4,096 numbers of a warp
    assert finish.count("st.global") == finish.count(r"st\.global\S*\.v4\.b32") == 2
    assert finish.count("ld.global") == finish.count(r"ld\.global\S*\.v4\.b32") == 10  # sums, scale; bias


def test_repack(compiled: dict[str, Compiled]) -> None:
    PackedArena({"fc": torch.zeros(64, 4096, dtype=torch.int8)}, high=8, bit_choices=CHOICES)
    repack = compiled["_repack"]
    assert repack.spilled == repack.shared == 0
    assert repack.count(r"bar\.sync") == 1  # no warp says what the block holds before all have read what it held
    assert repack.count(r"ld\.global\S*\.v4\.b32") == 8  # the planes of the master, once
    assert repack.count(r"st\.global\S*\.v4\.b32") == sum(range(2, 9))  # those of each width, once
