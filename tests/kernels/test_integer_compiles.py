"""The integer kernels compile for an H200, seen on a machine without one: int8 tensor cores, 16-byte loads, no fusing.

The interpreter runs kernels by their values and does not know what they become.
"""

import importlib.util
import math
import os
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from bitdial.kernels.reference.integer_sums import PAD_CODES
from bitdial.kernels.triton.inference.tiles import Geometry

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="here they are compiled to be run"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"),
]

POINTERS = {torch.float32: "*fp32", torch.int8: "*i8", torch.int32: "*i32", torch.float64: "*fp64"}
OF_A_QUOTIENT = 2  # multiply-adds that a quotient to round takes


@pytest.fixture
def assembly(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """PTX of the kernels launched so far: a launch compiles for an H200, and leaves outputs as they are."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.jit import JITFunction

    found: list[str] = []

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **settings: Any) -> None:
        given = dict(zip(self.arg_names, args, strict=False)) | settings
        options = {name: value for name, value in settings.items() if name not in self.arg_names}
        fixed = {p.name for p in self.params if p.is_constexpr or given[p.name] is None}
        constants = {(p.num,): given[p.name] for p in self.params if p.name in fixed}
        types = {p.name: "constexpr" if p.name in fixed else type_of(given[p.name]) for p in self.params}
        aligned = {
            (p.num,): [["tt.divisibility", 16]]
            for p in self.params
            if p.name not in fixed and is_aligned(given[p.name])
        }
        source = ASTSource(self, types, constants, aligned)
        found.append(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])

    monkeypatch.setattr(JITFunction, "run", compile_only)
    return found


def is_aligned(value: object) -> bool:
    """Whether Triton takes a tensor's address, or a number, as a multiple of 16; PyTorch's memory is aligned."""
    return isinstance(value, Tensor) or (type(value) is int and value % 16 == 0)


def type_of(value: object) -> str:
    return POINTERS[value.dtype] if isinstance(value, Tensor) else "i32"


def launch(
    *, channels: int, outputs: int, taps: int = 3, groups: int = 1, centred: bool = False, everything: bool = True
) -> None:
    from bitdial.kernels.triton.inference import epilogue as triton_finish
    from bitdial.kernels.triton.inference import integer as kernels

    x = torch.zeros(32, channels, 14, 14, dtype=torch.int8).contiguous(memory_format=torch.channels_last)
    weight = torch.zeros(outputs, taps, taps, channels // groups, dtype=torch.int8)
    geometry = Geometry.of(x, weight, (1, 1), (taps // 2, taps // 2), (1, 1), groups)
    line, numbers = torch.zeros(outputs), torch.zeros(5)
    other = torch.zeros(32, outputs, 14, 14).contiguous(memory_format=torch.channels_last) if everything else None
    second = numbers if everything else None
    finish = triton_finish.Finish(
        torch.zeros(2, outputs), other, 6.0 if everything else math.inf, numbers, second, everything
    )
    pad, correction = torch.zeros(PAD_CODES, dtype=torch.int8), line.int()
    bias = line if everything else None
    halves = torch.zeros(1, dtype=torch.int32) if centred else None
    kernels.convolve(x, weight, pad, correction, line, halves, bias, finish, geometry)


def copies(ptx: str) -> list[str]:
    """Bytes of each asynchronous copy to shared memory, as PTX writes them."""
    return re.findall(r"cp\.async\.c[ag]\.shared\.global [^;]*?, (0x[0-9a-f]+),", ptx)


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("channels, outputs, taps", [(64, 64, 3), (256, 64, 1), (512, 2048, 1), (128, 128, 3)])
def test_products_run_on_int8_tensor_cores(
    assembly: list[str], channels: int, outputs: int, taps: int, everything: bool, centred: bool
) -> None:
    launch(channels=channels, outputs=outputs, taps=taps, everything=everything, centred=centred)
    (ptx,) = assembly
    products = set(re.findall(r"wgmma\.mma_async\S*", ptx))
    assert products
    assert all(product.endswith(".s32.s8.s8") for product in products)
    assert set(copies(ptx)) == {"0x10"}
    assert not re.search(r"ld\.global\S*\.b8", ptx)
    assert "st.global.v4.b32" in ptx  # 16 codes at once


@pytest.mark.parametrize("shape", [{"channels": 3}, {"channels": 12, "groups": 2}, {"channels": 37, "taps": 1}])
def test_odd_shapes_compile(assembly: list[str], shape: dict[str, int]) -> None:
    launch(outputs=24, **shape)
    assert "wgmma.mma_async" in assembly[0]


def test_depthwise_compiles(assembly: list[str]) -> None:
    launch(channels=96, outputs=96, groups=96)
    launch(channels=33, outputs=33, groups=33, centred=True, everything=False)
    assert "ld.global.v4.b32" in assembly[0]
    assert len(assembly) == 2


def test_multiplications_and_additions_are_rounded_one_by_one(assembly: list[str]) -> None:
    """The norm's product and sum must not become one multiply-add; those there are belong to the quotients."""
    from bitdial.kernels.triton.inference import epilogue as kernels

    x, numbers = torch.zeros(4, 16), torch.ones(5)
    kernels.finish_value(x, kernels.Finish(torch.zeros(2, 16), x, math.inf, numbers, None, True))
    launch(channels=64, outputs=64, everything=False)
    for ptx in assembly:
        multiply_adds, roundings = (len(re.findall(p, ptx)) for p in (r"fma\.rn\.f32", r"add\S*\.f32 [^;]*0f4B400000"))
        assert roundings > 0
        assert multiply_adds == OF_A_QUOTIENT * roundings


def test_layers_kept_in_float_run_on_float64_tensor_cores(assembly: list[str]) -> None:
    from bitdial.kernels.triton.inference import epilogue as triton_finish
    from bitdial.kernels.triton.inference import fixed_point as triton_fixed_point

    x = torch.zeros(4, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    weight, powers = torch.zeros(64, 7, 7, 3, dtype=torch.float64), torch.ones(2, 4, dtype=torch.float64)
    geometry = Geometry.of(x, weight, (2, 2), (3, 3), (1, 1), 1)
    finish = triton_finish.Finish(torch.zeros(2, 64), None, math.inf, torch.zeros(5), None, True)
    triton_fixed_point.convolve(x, weight, powers, powers[0, :1], None, finish, geometry)
    rounding, product = assembly
    assert re.search(r"mma\.sync\.\S*\.f64\.f64\.f64\.f64", product)
    assert not any("fma.rn.f64" in ptx or ".ftz" in ptx for ptx in (rounding, product))


def test_powers_and_means_lose_nothing(assembly: list[str]) -> None:
    """Subnormal numbers stay what they are, and a quotient is a quotient."""
    from bitdial.kernels.triton.inference import sample_scales as triton_powers

    x = torch.zeros(2, 64, 14, 14).contiguous(memory_format=torch.channels_last)
    triton_powers.mean(x, triton_powers.sample_powers(x, 40))
    largest, powers, mean = assembly
    assert "ld.global.v4.b32" in largest
    for ptx in assembly:
        assert ".ftz" not in ptx
        assert "fma.rn.f64" not in ptx
    assert "cvt.f64.f32" in powers
    assert "div.rn.f64" in mean


def test_a_switch_reads_and_writes_16_bytes_at_once(assembly: list[str]) -> None:
    from bitdial.kernels.triton.inference import switch as triton_switch

    codes, words = torch.zeros(3 * 8192, dtype=torch.int8), torch.zeros(64, dtype=torch.int32)
    code_blocks, word_blocks = (torch.zeros(3, columns, dtype=torch.int32) for columns in (6, 5))
    wanted = torch.zeros(2, 6, dtype=torch.int32)
    triton_switch.switch(codes, codes.clone(), words, words.clone(), code_blocks, word_blocks, wanted)
    (ptx,) = assembly
    assert set(re.findall(r"st\.global\S*", ptx)) == {"st.global.v4.b32"}
    assert len(re.findall(r"ld\.global\.v4\.b32", ptx)) == 4  # 2 of codes, 2 of words
    assert "bar.sync" not in ptx
    assert ".shared" not in ptx


def pooled(*, channels: int, taps: int) -> None:
    from bitdial.kernels.triton.inference import pool as triton_pool

    x = torch.zeros(8, channels, 56, 56, dtype=torch.int8).contiguous(memory_format=torch.channels_last)
    size = (56 - taps + 2 * (taps // 2)) // 2 + 1
    windows = ([taps, taps], [2, 2], [taps // 2, taps // 2], [1, 1])
    triton_pool.max_pool(x, [8, channels, size, size], *windows)


def test_pools_read_and_write_16_codes_at_once(assembly: list[str]) -> None:
    for taps in (2, 3, 13):
        pooled(channels=64, taps=taps)
    for ptx in assembly:
        assert set(re.findall(r"st\.global\S*", ptx)) == {"st.global.v4.b32"}
        assert set(re.findall(r"ld\.global\S*", ptx)) == {"ld.global.v4.b32"}
        assert ".shared" not in ptx
        assert set(re.findall(r"mov\.u32 %r\d+, (0x\w+);", ptx)) == {"0x0"}  # other codes would fill one byte of four
    loads = [len(re.findall(r"ld\.global", ptx)) for ptx in assembly]
    assert loads == [4, 9, 13]  # all taps of a small window at once, of a large one row by row


@pytest.mark.parametrize("channels", [1, 3, 37])
def test_pools_of_odd_channels_compile(assembly: list[str], channels: int) -> None:
    pooled(channels=channels, taps=3)
    assert "st.global.b8" in assembly[0]


def test_codes_that_are_never_centred_do_not_pay_for_those_that_are(assembly: list[str]) -> None:
    for centred in (False, True):
        launch(channels=64, outputs=64, centred=centred)
    products, totals = ([len(re.findall(rf"wgmma\.mma_async\S*m64n{n}k32", ptx)) for ptx in assembly] for n in (64, 16))
    assert products[1] == 2 * products[0] > 0  # a loop for each kind of integers, or only one
    assert totals[0] == 0 < totals[1]  # sums of activations are products with ones
