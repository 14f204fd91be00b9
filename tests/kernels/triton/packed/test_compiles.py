"""The kernels of packed weights compile for an H200, without one: wide loads and stores, nothing spilled or shuffled.

Written for the layouts that `packed/linear.py` and `packed/unpack.py` count on: where Triton would choose others,
weights would move between threads. The results would still be right, and the kernels slow.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from bitdial.kernels.packed_ops import packed_linear, packed_scales
from bitdial.kernels.weight_pool import PackedWeightPool
from bitdial.kernels.word_layout import nested_fields, packed_fields, words_shape

CHOICES = (8, 6, 4, 3, 2)


def run(
    fields: tuple[int, ...],
    bits: int,
    x: Tensor,
    *,
    offset: float = 0.5,
    bias: Tensor | None = None,
    rows: int = 64,
    group: int = 0,
    scales: torch.dtype = torch.uint8,
) -> None:
    """Launch the layer on a weight of zeros; `group` columns have a scale, of type `scales`, where it is not 0."""
    columns = x.shape[1]
    words = torch.zeros(words_shape(fields, rows, columns), dtype=torch.int32)
    scale, groups = torch.ones(rows), None if group == 0 else torch.ones(rows, columns // group, dtype=scales)
    if groups is not None and scales == torch.float32:
        scale, groups = groups, None
    scale, groups = packed_scales(scale, groups, columns=columns)
    packed_linear(x, words, scale, bias, fields, bits, 8, offset, groups)


@pytest.mark.parametrize("bits", CHOICES)
def test_nested_weights_for_one_token(compiled: Any, bits: int) -> None:
    run(nested_fields(CHOICES), bits, torch.zeros(1, 4096, dtype=torch.bfloat16))
    few = compiled["_few"]
    assert few.spilled == 0
    assert few.count(r"ld\.global\S*\.v4\.b32", in_loop=True) == bits + 8  # the planes; the tokens
    assert few.count(r"mma\.sync", in_loop=True) == 16
    assert few.count(r"shfl|shared|ldmatrix", in_loop=True) == 0


@pytest.mark.slow
def test_groups_for_one_token(compiled: Any) -> None:
    """A load or two more for a tile, and no more products: the sums of groups lie beside each other.

    A thread loads its own group's numbers only.
    """
    as_bytes = [(bits, 64, torch.uint8) for bits in CHOICES]
    as_bytes += [(8, 32, torch.uint8), (4, 32, torch.uint8), (2, 128, torch.uint8), (4, 256, torch.uint8)]
    for bits, group, scales in (*as_bytes, (8, 64, torch.float32), (6, 32, torch.float32), (4, 64, torch.float32)):
        x = torch.zeros(1, 4096, dtype=torch.bfloat16)
        run(nested_fields(CHOICES), bits, x, rows=14336, group=group, scales=scales)
        few = compiled["_few"]
        assert few.spilled == 0, (bits, group, scales)
        of_tokens = group // 32
        assert few.count(r"ld\.global\S*\.v4\.b32", in_loop=True) == bits + of_tokens
        of_scales = 2 if (group, scales) == (32, torch.float32) else 1
        assert few.count(r"ld\.global", in_loop=True) == bits + of_tokens + of_scales
        assert few.count(r"mma\.sync", in_loop=True) == 16
        assert few.count(r"fma\.rn\.f32\s", in_loop=True) == (4 if group == 32 else 2)
        assert few.count(r"shfl|shared|ldmatrix", in_loop=True) == 0


@pytest.mark.slow
def test_groups_for_sixteen_tokens(compiled: Any) -> None:
    for bits, group, rows, scales in (
        (8, 64, 14336, torch.uint8), (4, 64, 14336, torch.uint8), (2, 64, 14336, torch.uint8),
        (4, 32, 4096, torch.uint8), (3, 128, 8192, torch.float32), (8, 32, 14336, torch.float32),
    ):  # fmt: skip
        x = torch.zeros(16, 4096, dtype=torch.bfloat16)
        run(nested_fields(CHOICES), bits, x, rows=rows, group=group, scales=scales)
        few, tiles, runs = compiled["_few"], 2 if bits == 2 else 1, 256 // group
        assert few.spilled == 0, (bits, group, scales)
        assert few.count(r"ld\.global\S*\.v4\.b32", in_loop=True) == tiles * bits + 16
        assert few.count(r"mma\.sync", in_loop=True) == tiles * 32
        assert few.count(r"fma\.rn\.f32\s", in_loop=True) == tiles * runs * 8
        assert few.count(r"shfl|shared|ldmatrix", in_loop=True) == 0


@pytest.mark.parametrize(("bits", "dtype"), [(3, torch.float16), (8, torch.bfloat16), (8, torch.float16)])
def test_rounded_weights_for_sixteen_tokens(compiled: Any, bits: int, dtype: torch.dtype) -> None:
    run(packed_fields(bits), bits, torch.zeros(16, 4096, dtype=dtype), offset=0.0, bias=torch.zeros(64, dtype=dtype))
    few = compiled["_few"]
    assert few.spilled == 0
    assert few.count(r"ld\.global\S*\.v4\.b32", in_loop=True) == bits + 16  # twice the tokens
    assert few.count(r"shfl|shared|ldmatrix", in_loop=True) == 0
    assert "_add_splits" in compiled


@pytest.mark.parametrize("rows", [8192, 14336])
def test_twice_the_rows_for_sixteen_tokens_at_two_bits(compiled: Any, rows: int) -> None:
    run(nested_fields(CHOICES), 2, torch.zeros(16, 4096, dtype=torch.bfloat16), rows=rows)
    few = compiled["_few"]
    assert few.spilled == 0
    assert few.count(r"ld\.global\S*\.v4\.b32", in_loop=True) == 2 * 2 + 16
    assert few.count(r"shfl|shared|ldmatrix", in_loop=True) == 0
    assert "_add_splits" not in compiled


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("scheme", "bits"), [("nested", 2), ("nested", 8), ("double_rounding", 3)])
def test_many_tokens(compiled: Any, scheme: str, bits: int, dtype: torch.dtype) -> None:
    fields, offset = (nested_fields(CHOICES), 0.5) if scheme == "nested" else (packed_fields(bits), 0.0)
    run(fields, bits, torch.zeros(256, 4096, dtype=dtype), offset=offset, bias=torch.zeros(64, dtype=dtype))
    unpack, finish = compiled["_unpack"], compiled["_scale_sums"]
    for kernel in (unpack, finish):
        assert kernel.spilled == kernel.shared == 0
        assert kernel.count("shfl|bar") == 0
    assert unpack.count("ld.global") == unpack.count(r"ld\.global\S*\.v4\.b32") == bits  # the planes, once
    assert unpack.count("st.global") == unpack.count(r"st\.global\S*\.v4\.b32") == 16  # 4,096 numbers of a warp
    assert finish.count("st.global") == finish.count(r"st\.global\S*\.v4\.b32") == 2
    assert finish.count("ld.global") == finish.count(r"ld\.global\S*\.v4\.b32") == 10  # sums, scale; bias


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_many_tokens_of_groups(compiled: Any, dtype: torch.dtype) -> None:
    """Products of warp groups, whose sums meet two scales a thread each."""
    for group, scales in ((32, torch.uint8), (64, torch.float32), (128, torch.uint8)):
        run((4,), 4, torch.zeros(256, 4096, dtype=dtype), bias=torch.zeros(64, dtype=dtype), group=group, scales=scales)
        product = compiled["_grouped_product"]
        assert product.spilled == 0
        assert product.count(r"wgmma\.mma_async") > 0
        assert product.count(r"ld\.global", in_loop=True) == 2


def test_repack(compiled: Any) -> None:
    PackedWeightPool({"fc": torch.zeros(64, 4096, dtype=torch.int8)}, high=8, bit_choices=CHOICES)
    repack = compiled["_repack"]
    assert repack.spilled == repack.shared == 0
    assert repack.count(r"bar\.sync") == 1  # no warp says what the block holds before all have read what it held
    assert repack.count(r"ld\.global\S*\.v4\.b32") == 8  # the planes of the master, once
    assert repack.count(r"st\.global\S*\.v4\.b32") == sum(range(2, 9))  # those of each width, once
