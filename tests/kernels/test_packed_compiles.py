"""The kernels of packed weights compile for an H200, without one: wide loads and stores, nothing spilled or shuffled.

Written for the layouts that `triton_linear` and `triton_unpack` count on: where Triton would choose others, weights
would move between threads. The results would still be right, and the kernels slow.
"""

from typing import Any

import pytest
import torch

from bitdial.kernels.packed_ops import PackedWeight
from bitdial.kernels.weight_pool import PackedWeightPool
from bitdial.kernels.word_layout import nested_fields, packed_fields, words_shape

CHOICES = (8, 6, 4, 3, 2)


def weight(fields: tuple[int, ...], scheme: str, rows: int = 64, columns: int = 4096) -> PackedWeight:
    words = torch.zeros(words_shape(fields, rows, columns), dtype=torch.int32)
    return PackedWeight(name="fc", words=words, scale=torch.ones(rows), columns=columns, fields=fields, high=8,
                        scheme=scheme)  # fmt: skip


@pytest.mark.parametrize("bits", CHOICES)
def test_nested_weights_for_one_token(compiled: Any, bits: int) -> None:
    weight(nested_fields(CHOICES), "nested").linear(torch.zeros(1, 4096, dtype=torch.bfloat16), bits)
    few = compiled["_few"]
    assert few.spilled == 0
    assert few.count(r"ld\.global\S*\.v4\.b32", in_loop=True) == bits + 8  # the planes; the tokens
    assert few.count(r"mma\.sync", in_loop=True) == 16
    assert few.count(r"shfl|shared|ldmatrix", in_loop=True) == 0


@pytest.mark.parametrize(("bits", "dtype"), [(3, torch.float16), (8, torch.bfloat16), (8, torch.float16)])
def test_rounded_weights_for_sixteen_tokens(compiled: Any, bits: int, dtype: torch.dtype) -> None:
    bias = torch.zeros(64, dtype=dtype)
    weight(packed_fields(bits), "double_rounding").linear(torch.zeros(16, 4096, dtype=dtype), bits, bias)
    few = compiled["_few"]
    assert few.spilled == 0
    assert few.count(r"ld\.global\S*\.v4\.b32", in_loop=True) == bits + 16  # twice the tokens
    assert few.count(r"shfl|shared|ldmatrix", in_loop=True) == 0
    assert "_add_splits" in compiled


@pytest.mark.parametrize("rows", [8192, 14336])
def test_twice_the_rows_for_sixteen_tokens_at_two_bits(compiled: Any, rows: int) -> None:
    weight(nested_fields(CHOICES), "nested", rows).linear(torch.zeros(16, 4096, dtype=torch.bfloat16), 2)
    few = compiled["_few"]
    assert few.spilled == 0
    assert few.count(r"ld\.global\S*\.v4\.b32", in_loop=True) == 2 * 2 + 16
    assert few.count(r"shfl|shared|ldmatrix", in_loop=True) == 0
    assert "_add_splits" not in compiled


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("scheme", "bits"), [("nested", 2), ("nested", 8), ("double_rounding", 3)])
def test_many_tokens(compiled: Any, scheme: str, bits: int, dtype: torch.dtype) -> None:
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


def test_repack(compiled: Any) -> None:
    PackedWeightPool({"fc": torch.zeros(64, 4096, dtype=torch.int8)}, high=8, bit_choices=CHOICES)
    repack = compiled["_repack"]
    assert repack.spilled == repack.shared == 0
    assert repack.count(r"bar\.sync") == 1  # no warp says what the block holds before all have read what it held
    assert repack.count(r"ld\.global\S*\.v4\.b32") == 8  # the planes of the master, once
    assert repack.count(r"st\.global\S*\.v4\.b32") == sum(range(2, 9))  # those of each width, once
