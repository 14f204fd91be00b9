"""Blocks: the library decodes them to our weights bit for bit where halves hold the scales, else as near as said."""

import pytest
import torch

from bitdial.export.gguf_blocks import NEAR, TYPES, BlockType, Weight, packed

pytest.importorskip("gguf")
ROWS, INPUTS = 4, 512


def made(kind: BlockType, *, row_bits: int, group: int = 32, two_levels: bool = True) -> Weight:
    """A weight with every code of a type, whose row steps have that many significant bits."""
    generator = torch.Generator().manual_seed(kind.most)
    least, most = (-(kind.most + 1) // 2, kind.most // 2) if kind.minimum else (kind.least, kind.most)
    codes = torch.randint(least, most + 1, (ROWS, INPUTS), generator=generator, dtype=torch.int8)
    codes[:, :256] = torch.arange(256).remainder(most + 1 - least).add(least)
    mantissa = torch.randint(1 << (row_bits - 1), 1 << row_bits, (ROWS,), generator=generator) | 1
    rows = mantissa * 2.0 ** -(row_bits + 8)
    multipliers = torch.randint(1, 16, (ROWS, INPUTS // group), generator=generator, dtype=torch.uint8)
    offset = (2, 1) if kind.minimum else (1, 0)
    step = rows[:, None] * multipliers
    return Weight(codes, least, most, *offset, rows, multipliers if two_levels else None, step)


def by_hand(weight: Weight) -> torch.Tensor:
    """Each weight from its code, one by one in Python's numbers."""
    group = weight.codes.shape[1] // weight.step.shape[1]
    rows = [
        [(code + weight.addend / weight.factor) * steps[place // group] for place, code in enumerate(codes)]
        for codes, steps in zip(weight.codes.tolist(), weight.step.double().tolist(), strict=True)
    ]
    return torch.tensor(rows, dtype=torch.float64)


def decoded(name: str, blocks: object) -> torch.Tensor:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    return torch.from_numpy(dequantize(blocks, GGMLQuantizationType[name])).double()  # type: ignore[arg-type]


def test_every_type_holds_every_code_and_multiplier_exactly() -> None:
    for kind in TYPES:
        bits = 2 if kind.minimum and not kind.two_levels else 6  # minima and multipliers take up to 9 bits more
        for group in (32, 64, 512):
            weight = made(kind, row_bits=bits, group=group)
            found = packed(weight, (kind,))
            assert found is not None
            assert found.rounding == (0, 0), kind.name
            assert found.blocks.shape == (ROWS, INPUTS // kind.block * kind.bytes)
            assert torch.equal(decoded(kind.name, found.blocks), by_hand(weight)), kind.name


def test_what_rounding_costs_is_what_the_decoded_weights_say() -> None:
    for kind in TYPES:
        weight = made(kind, row_bits=12)
        found = packed(weight, (kind,))
        assert found is not None
        ours, theirs = by_hand(weight), decoded(kind.name, found.blocks)
        off = (theirs - ours).abs()
        assert found.rounding.rms == pytest.approx(float((off.square().sum() / ours.square().sum()).sqrt()))
        assert 0 < found.rounding.rms <= NEAR, kind.name
        floor = weight.step.double().repeat_interleave(32, dim=1) / 2
        assert found.rounding.largest == pytest.approx(float((off / ours.abs().maximum(floor)).max()))
        if not kind.minimum:  # a half has 11 bits
            assert found.rounding.largest <= 2**-11, kind.name


def test_the_smallest_exact_type_is_taken() -> None:
    plain = made(TYPES[5], row_bits=6)._replace(codes=torch.zeros(ROWS, INPUTS, dtype=torch.int8))
    for (least, most), (factor, addend), row_bits, name in (
        ((-2, 1), (1, 0), 6, "Q2_K"), ((-4, 3), (1, 0), 6, "Q3_K"), ((-8, 7), (1, 0), 6, "Q4_0"),
        ((-16, 15), (1, 0), 6, "Q5_0"), ((-32, 31), (1, 0), 6, "Q6_K"), ((-128, 127), (1, 0), 6, "Q8_0"),
        ((-2, 1), (2, 1), 6, "Q2_K"), ((-4, 3), (2, 1), 6, "Q4_0"), ((-8, 7), (2, 1), 6, "Q4_K"),
        ((-32, 31), (2, 1), 6, "Q8_0"),
        ((-8, 7), (1, 0), 11, "Q4_K"),  # row steps alone are halves there
    ):  # fmt: skip
        rows = torch.full((ROWS,), ((1 << row_bits) - 1) * 2.0**-18)
        codes = torch.randint(least, most + 1, (ROWS, INPUTS)).to(torch.int8)
        weight = plain._replace(
            codes=codes, least=least, most=most, factor=factor, addend=addend, row_step=rows,
            step=rows[:, None] * plain.multipliers,
        )  # fmt: skip
        found = packed(weight)
        assert found is not None
        assert (found.type, found.rounding) == (name, (0, 0)), (least, most, factor, row_bits)


def test_blocks_lie_inside_groups_and_rows() -> None:
    four = made(TYPES[2], row_bits=6)
    own_steps = made(TYPES[2], row_bits=6, two_levels=False)
    narrow = four._replace(codes=four.codes[:, :96], multipliers=four.multipliers[:, :3], step=four.step[:, :3])
    assert not any(kind.holds(own_steps) for kind in TYPES if kind.two_levels)
    assert not any(kind.holds(narrow) for kind in TYPES if kind.block > 32)
    for group, fits in ((16, {"Q6_K"}), (32, {"Q4_0", "Q4_K", "Q4_1", "Q5_0", "Q5_K", "Q5_1", "Q6_K", "Q8_0"})):
        weight = made(TYPES[2], row_bits=6, group=group)
        assert {kind.name for kind in TYPES if kind.holds(weight)} == fits
    for inputs in (48, 33):
        codes = four.codes[:, :inputs]
        assert packed(four._replace(codes=codes, multipliers=four.multipliers[:, :1], step=four.step[:, :1])) is None


def test_scales_that_no_half_can_say() -> None:
    weight = made(TYPES[2], row_bits=6)
    huge = weight._replace(row_step=weight.row_step * 2.0**40, step=weight.step * 2.0**40)
    assert packed(huge) is None
    tiny = weight._replace(row_step=weight.row_step * 2.0**-14, step=weight.step * 2.0**-14)  # subnormal halves
    found = packed(tiny)
    assert found is not None
    assert found.rounding.largest > 2**-11
    assert torch.allclose(decoded(found.type, found.blocks), by_hand(tiny), rtol=found.rounding.largest * 1.001, atol=0)
