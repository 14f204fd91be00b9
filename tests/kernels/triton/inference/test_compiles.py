"""The integer kernels compile for an H200, seen on a machine without one: int8 tensor cores, 16-byte loads, no fusing.

The interpreter runs kernels by their values and does not know what they become.
"""

import math
import re
from typing import Any

import pytest
import torch

from bitdial.kernels.conv_shape import ConvShape, conv_shape
from bitdial.kernels.epilogue import Epilogue
from bitdial.kernels.operands import PAD_CODES, FixedPointOperands, IntegerOperands
from bitdial.kernels.switch import SwitchTables

OF_A_QUOTIENT = 2  # multiply-adds that a quotient to round takes


def launch(
    *, channels: int, outputs: int, taps: int = 3, groups: int = 1, doubled: bool = False, everything: bool = True
) -> None:
    from bitdial.kernels.triton.inference import integer as kernels

    x = torch.zeros(32, channels, 14, 14, dtype=torch.int8).contiguous(memory_format=torch.channels_last)
    weight = torch.zeros(outputs, taps, taps, channels // groups, dtype=torch.int8)
    shape = conv_shape(x, weight, (1, 1), (taps // 2, taps // 2), (1, 1), groups)
    factor, numbers = torch.zeros(outputs), torch.zeros(5)
    residual = torch.zeros(32, outputs, 14, 14).contiguous(memory_format=torch.channels_last) if everything else None
    epilogue = Epilogue(
        torch.zeros(2, outputs), residual, 6.0 if everything else math.inf, numbers, numbers if everything else None,
        everything,
    )  # fmt: skip
    flag, bias = torch.zeros(1, dtype=torch.int32) if doubled else None, factor if everything else None
    pad = torch.zeros(PAD_CODES, dtype=torch.int8)
    kernels.convolve(x, IntegerOperands(weight, pad, factor.int(), factor, flag, bias), shape, epilogue)


def copies(ptx: str) -> list[str]:
    """Bytes of each asynchronous copy to shared memory, as PTX writes them."""
    return re.findall(r"cp\.async\.c[ag]\.shared\.global [^;]*?, (0x[0-9a-f]+),", ptx)


@pytest.mark.parametrize("doubled", [False, True])
@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("channels, outputs, taps", [(64, 64, 3), (256, 64, 1), (512, 2048, 1), (128, 128, 3)])
def test_products_run_on_int8_tensor_cores(
    compiled: Any, channels: int, outputs: int, taps: int, everything: bool, doubled: bool
) -> None:
    launch(channels=channels, outputs=outputs, taps=taps, everything=everything, doubled=doubled)
    (ptx,) = (launch.ptx for launch in compiled)
    products = set(re.findall(r"wgmma\.mma_async\S*", ptx))
    assert products
    assert all(product.endswith(".s32.s8.s8") for product in products)
    assert set(copies(ptx)) == {"0x10"}
    assert not re.search(r"ld\.global\S*\.b8", ptx)
    assert "st.global.v4.b32" in ptx  # 16 codes at once


@pytest.mark.parametrize("shape", [{"channels": 3}, {"channels": 12, "groups": 2}, {"channels": 37, "taps": 1}])
def test_odd_shapes_compile(compiled: Any, shape: dict[str, int]) -> None:
    launch(outputs=24, **shape)
    assert [launch.count(r"wgmma\.mma_async") > 0 for launch in compiled] == [True]


def test_depthwise_compiles(compiled: Any) -> None:
    launch(channels=96, outputs=96, groups=96)
    launch(channels=33, outputs=33, groups=33, doubled=True, everything=False)
    first, second = compiled
    assert "ld.global.v4.b32" in first.ptx
    assert first.name == second.name == "_convolve_depthwise"


def test_multiplications_and_additions_are_rounded_one_by_one(compiled: Any) -> None:
    """The norm's product and sum must not become one multiply-add; those there are belong to the quotients."""
    from bitdial.kernels.triton.inference import epilogue as kernels

    x, numbers = torch.zeros(4, 16), torch.ones(5)
    kernels.apply_epilogue(x, Epilogue(torch.zeros(2, 16), x, math.inf, numbers))
    launch(channels=64, outputs=64, everything=False)
    for kernel in compiled:
        multiply_adds, roundings = kernel.count(r"fma\.rn\.f32"), kernel.count(r"add\S*\.f32 [^;]*0f4B400000")
        assert roundings > 0
        assert multiply_adds == OF_A_QUOTIENT * roundings


def test_layers_kept_in_float_run_on_float64_tensor_cores(compiled: Any) -> None:
    from bitdial.kernels.triton.inference import fixed_point as triton_fixed_point

    x = torch.zeros(4, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    weight, scales = torch.zeros(64, 7, 7, 3, dtype=torch.float64), torch.ones(2, 4, dtype=torch.float64)
    operands = FixedPointOperands(weight, scales, scales[0, :1], None)
    epilogue = Epilogue(torch.zeros(2, 64), None, math.inf, torch.zeros(5))
    triton_fixed_point.convolve(x, operands, conv_shape(x, weight, (2, 2), (3, 3)), epilogue)
    rounding, product = (launch.ptx for launch in compiled)
    assert re.search(r"mma\.sync\.\S*\.f64\.f64\.f64\.f64", product)
    assert not any("fma.rn.f64" in ptx or ".ftz" in ptx for ptx in (rounding, product))


def test_powers_and_means_lose_nothing(compiled: Any) -> None:
    """Subnormal numbers stay what they are, and a quotient is a quotient."""
    from bitdial.kernels.triton.inference import sample_scales

    x = torch.zeros(2, 64, 14, 14).contiguous(memory_format=torch.channels_last)
    sample_scales.mean(x, sample_scales.sample_powers(x, 40))
    largest, powers, mean = (launch.ptx for launch in compiled)
    assert "ld.global.v4.b32" in largest
    for ptx in (largest, powers, mean):
        assert ".ftz" not in ptx
        assert "fma.rn.f64" not in ptx
    assert "cvt.f64.f32" in powers
    assert "div.rn.f64" in mean


def test_a_switch_reads_and_writes_16_bytes_at_once(compiled: Any) -> None:
    from bitdial.kernels.triton.inference import switch as triton_switch

    codes, words = torch.zeros(3 * 8192, dtype=torch.int8), torch.zeros(64, dtype=torch.int32)
    code_blocks, word_blocks = (torch.zeros(3, columns, dtype=torch.int32) for columns in (6, 5))
    wanted = torch.zeros(2, 6, dtype=torch.int32)
    triton_switch.switch(SwitchTables(codes, codes.clone(), words, words.clone(), code_blocks, word_blocks, wanted))
    (ptx,) = (launch.ptx for launch in compiled)
    assert set(re.findall(r"st\.global\S*", ptx)) == {"st.global.v4.b32"}
    assert len(re.findall(r"ld\.global\.v4\.b32", ptx)) == 4  # 2 of codes, 2 of words
    assert "bar.sync" not in ptx
    assert ".shared" not in ptx


def pooled(*, channels: int, taps: int) -> None:
    from bitdial.kernels.triton.inference import max_pool as triton_pool

    x = torch.zeros(8, channels, 56, 56, dtype=torch.int8).contiguous(memory_format=torch.channels_last)
    filters, padding = (channels, taps, taps), (taps // 2, taps // 2)
    triton_pool.max_pool(x, ConvShape.of((channels, 56, 56), filters, (2, 2), padding, (1, 1), channels))


def test_pools_read_and_write_16_codes_at_once(compiled: Any) -> None:
    for taps in (2, 3, 13):
        pooled(channels=64, taps=taps)
    for ptx in (launch.ptx for launch in compiled):
        assert set(re.findall(r"st\.global\S*", ptx)) == {"st.global.v4.b32"}
        assert set(re.findall(r"ld\.global\S*", ptx)) == {"ld.global.v4.b32"}
        assert ".shared" not in ptx
        assert set(re.findall(r"mov\.u32 %r\d+, (0x\w+);", ptx)) == {"0x0"}  # other codes would fill one byte of four
    loads = [launch.count(r"ld\.global") for launch in compiled]
    assert loads == [4, 9, 13]  # all taps of a small window at once, of a large one row by row


@pytest.mark.parametrize("channels", [1, 3, 37])
def test_pools_of_odd_channels_compile(compiled: Any, channels: int) -> None:
    pooled(channels=channels, taps=3)
    assert "st.global.b8" in compiled["_max_pool"].ptx


def test_codes_that_are_never_doubled_do_not_pay_for_those_that_are(compiled: Any) -> None:
    for doubled in (False, True):
        launch(channels=64, outputs=64, doubled=doubled)
    products, totals = ([launch.count(rf"wgmma\.mma_async\S*m64n{n}k32") for launch in compiled] for n in (64, 16))
    assert products[1] == 2 * products[0] > 0  # a loop for each kind of integers, or only one
    assert totals[0] == 0 < totals[1]  # sums of activations are products with ones
