"""`packed_linear` on the CPU by bytes, half bytes and floats, against float64; and what it keeps."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from bitdial import functional as bf
from bitdial.kernels.cpu import layouts, nibbles
from bitdial.kernels.cpu.layouts import FloatLayout, IntegerLayout, Layouts
from bitdial.kernels.kept_layouts import Use, forget, held_for
from bitdial.kernels.packed_ops import packed_linear, packed_scales
from bitdial.kernels.word_layout import nested_fields, pack_words

CHOICES = (8, 6, 4, 3, 2)
FIELDS = nested_fields(CHOICES)
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
TYPES = list(UNIT)


def make(rows: int, columns: int, group: int | None, *, bytes_only: bool = True) -> tuple[Any, ...]:
    """8-bit codes, words, and scales as the op takes them and in float64 (rows, columns)."""
    generator = torch.Generator().manual_seed(rows * columns)
    codes = torch.randint(-128, 128, (rows, columns), generator=generator).to(torch.int8)
    scale = torch.rand(rows, generator=generator) / 50 + 0.01
    each, given = scale.double()[:, None].expand(rows, columns), packed_scales(scale, columns=columns)
    if group and bytes_only:
        multipliers = torch.randint(1, 16, (rows, columns // group), generator=generator, dtype=torch.uint8)
        each = each * multipliers.repeat_interleave(group, 1)
        given = packed_scales(scale, multipliers, columns=columns)
    elif group:
        groups = torch.rand(rows, columns // group, generator=generator) / 50 + 0.01
        each, given = groups.double().repeat_interleave(group, 1), packed_scales(groups, columns=columns)
    return codes, pack_words(codes, FIELDS), given, each


def check(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, *, nibbles_run: bool) -> None:
    exact = x.double() @ weight.T
    size, fixed = x.double().abs() @ weight.T.abs(), 2.0**-29 * x.double().abs().amax(1, keepdim=True)
    product = exact
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    bound = UNIT[x.dtype] * exact.abs() + x.shape[1] * 2.0**-23 * size + fixed * weight.abs().sum(1)
    if nibbles_run:
        bound = bound + UNIT[x.dtype] * (product.abs() + bound)
    assert y.dtype == x.dtype
    assert bool(((y.double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("group", [None, 32, 64, 128])
@pytest.mark.parametrize("bytes_only", [True, False])
def test_products_are_within_the_bound(group: int | None, bytes_only: bool) -> None:
    """Every width and offset, every type, odd sizes, one, few and many tokens, one token behind another."""
    generator = torch.Generator().manual_seed(0)
    for rows, columns in ((48, 256), (33, 384)) if group else ((48, 288), (7, 101), (1, 1), (16, 70)):
        codes, words, (scale, group_scale), each = make(rows, columns, group, bytes_only=bytes_only)
        for i, (scheme, bits) in enumerate((s, b) for s in ("centred", "nested", "nested+8") for b in CHOICES):
            low, offset = bf.narrow(codes, high=8, low=bits, scheme=scheme), bf.scheme_of(scheme).offset(8 - bits)
            weight = (low.double() + offset) * each * 2.0 ** (8 - bits)
            dtype, bias = TYPES[i % 3], torch.randn(rows, generator=generator).to(TYPES[i % 3]) if i % 2 else None
            x = torch.randn(21, columns, generator=generator).to(dtype)
            for tokens in (x, x[:1], x[3:8]):
                y = packed_linear(tokens, words, scale, bias, FIELDS, bits, 8, offset, group_scale)
                few = bits <= 4 and dtype == torch.bfloat16 and len(tokens) <= 16
                check(tokens, y, weight, bias, nibbles_run=few)
                together = packed_linear(x, words, scale, bias, FIELDS, bits, 8, offset, group_scale)
                if not few and group is None:
                    assert torch.equal(together[3:8], y) or len(tokens) != 5, "other tokens change nothing"


def layouts_of(bits: int, group: int | None, scheme: str, *, bytes_only: bool = True) -> Layouts:
    _, words, (scale, group_scale), _ = make(32, 256, group, bytes_only=bytes_only)
    use = Use(FIELDS, bits, 8, bf.scheme_of(scheme).offset(8 - bits))
    return layouts.make_layouts(words, scale, group_scale, use, 256)


@pytest.mark.skipif(not layouts.products_are_exact(), reason="this CPU has no exact products of bytes")
def test_which_weights_take_how_many_bytes() -> None:
    for bits, group, scheme, planes in (
        (8, None, "nested", 1), (8, None, "centred", 2), (4, None, "nested+8", 1), (8, 64, "nested", 2),
        (4, 64, "nested", 2), (3, 64, "nested", 1), (2, 32, "centred", 1),
    ):  # fmt: skip
        made = layouts_of(bits, group, scheme).exact
        assert isinstance(made, IntegerLayout)
        assert made.weight.nbytes == planes * 32 * 256, (bits, group, scheme)
        assert len(made.step) == planes * 32
    assert isinstance(layouts_of(4, 64, "nested", bytes_only=False).exact, FloatLayout)


@pytest.mark.skipif(not nibbles.product_is_right(), reason="PyTorch has no fast product of half bytes here")
def test_which_weights_have_half_bytes() -> None:
    made = layouts_of(4, None, "nested").nibbles
    assert made is not None
    assert made.codes.nbytes == 32 * 256 // 2
    assert made.group == 256
    assert layouts_of(8, None, "nested").nibbles is None
    assert layouts_of(3, 64, "nested").nibbles.group == 64  # type: ignore[union-attr]
    assert layouts_of(2, 64, "nested", bytes_only=False).nibbles is None
    codes, step = torch.zeros(32, 256, dtype=torch.int8), torch.ones(32)
    assert nibbles.nibble_layout(codes[:17], None, 0.0, step) is None
    assert nibbles.nibble_layout(codes[:, :40], None, 0.0, step) is None
    assert nibbles.nibble_layout(codes, None, 1 / 3, step) is None, "bf16 does not have that offset"


def test_without_products_of_bytes_the_weight_is_held_in_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "products_are_exact", lambda: False)
    codes, words, (scale, _), each = make(20, 90, None)
    x = torch.randn(3, 90)
    y = packed_linear(x, words, scale, None, FIELDS, 8, 8, 0.0)
    assert torch.equal(y, torch.nn.functional.linear(x, (codes.double() * each).float()))


def test_many_sums_are_made_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    _, words, (scale, _), _ = make(20, 90, None)
    x = torch.randn(23, 90)
    whole = packed_linear(x, words, scale, None, FIELDS, 8, 8, 0.0)
    monkeypatch.setattr(layouts, "MOST_SUMS", 4 * 20 * 5)
    assert torch.equal(packed_linear(x, words, scale, None, FIELDS, 8, 8, 0.0), whole)


def test_one_layout_is_kept_for_the_width_in_use() -> None:
    codes, words, (scale, _), each = make(32, 96, None)
    x = torch.randn(1, 96)

    def run(bits: int) -> Tensor:
        y = packed_linear(x, words, scale, None, FIELDS, bits, 8, 0.0)
        low = bf.narrow(codes, high=8, low=bits, scheme="truncate")
        check(x, y, low.double() * each * 2.0 ** (8 - bits), None, nibbles_run=False)
        return y

    assert held_for(words) == []
    run(8)
    held = held_for(words)
    run(8)
    assert all(a is b for a, b in zip(held, held_for(words), strict=True)), "nothing is made at each call"
    for bits in (4, 2, 3, 8, 6):
        run(bits)
        assert sum(t.nbytes for t in held_for(words)) <= 1.5 * 32 * 96 + 1000
    words.copy_(pack_words(codes.flip(0), FIELDS))
    codes = codes.flip(0)
    run(6)  # words that were changed in place
    scale.mul_(2.0)
    each = each * 2
    run(6)
    forget(words)
    assert held_for(words) == []
    run(4)


def test_a_layout_goes_with_its_words() -> None:
    _, words, (scale, _), _ = make(32, 96, None)
    packed_linear(torch.randn(1, 96), words, scale, None, FIELDS, 8, 8, 0.0)
    layout = weakref.ref(held_for(words)[0])
    assert layout() is not None
    del words
    gc.collect()
    assert layout() is None


def test_what_is_made_in_inference_mode_can_be_used_outside() -> None:
    _, words, (scale, _), _ = make(32, 96, None)
    x = torch.randn(2, 96).bfloat16()
    with torch.inference_mode():
        first = packed_linear(x, words, scale, None, FIELDS, 4, 8, 0.5)
    assert torch.equal(packed_linear(x, words, scale, None, FIELDS, 4, 8, 0.5), first)
