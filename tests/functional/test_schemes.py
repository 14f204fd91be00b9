"""The schemes and the integers they share, against references in exact rationals.

`narrow` for every code, width and rule; `nested` for every stored code, width and phase, from its definition.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from bitdial import functional as bf
from bitdial.errors import BitdialError, ConfigError, QuantizationError

ALL_PAIRS = [(high, low) for high in range(2, 9) for low in range(2, high + 1)]
TIES = ("even", "up")
PHASES = (0, 1, 2, 4, 8, 16, 32)
NARROWABLE = ("double_rounding", "nested", "nested+8", "centred", "truncate", "adabits")


# --- references ---------------------------------------------------------------------------------


def nested(phase: int) -> str:
    return f"nested+{phase}" if phase else "nested"


def narrow_one(code: int, high: int, low: int, scheme: str, ties: str) -> int:
    """The second rounding in exact rationals: code / 2^shift to the nearest, or down."""
    exact = Fraction(code, 2 ** (high - low))
    if scheme != "double_rounding":
        return math.floor(exact)
    if high == low:
        return code
    nearest = round(exact) if ties == "even" else math.floor(exact + Fraction(1, 2))
    return min(nearest, 2 ** (low - 1) - 1)


def nested_value(stored: int, high: int, low: int, phase: int) -> int:
    """What a stored code stands for at `low` bits, in steps of the stored codes.

    At the highest width it stands for itself, below for the middle of its cell [k, k + 1) * 2^shift; the phase, which
    was added before the code was stored, is taken away.
    """
    cell = 2 ** (high - low)
    return stored // cell * cell + (cell // 2 if cell > 1 else 0) - phase


def stored_codes(high: int, phase: int) -> range:
    """The codes -2^(high - 1) and up, with the phase added; none goes beyond `high` bits."""
    return range(-(2 ** (high - 1)) + phase, 2 ** (high - 1))


def phase_fits(phase: int, high: int) -> bool:
    """Whether a phase is below the largest code and every value at every width is a whole number of `high` bits."""
    top = 2 ** (high - 1) - 1
    values = [nested_value(c, high, low, phase) for low in range(2, high + 1) for c in stored_codes(high, phase)]
    return phase < top and all(-top - 1 <= value <= top for value in values)


# --- narrow: exhaustive -------------------------------------------------------------------------


@pytest.mark.parametrize("ties", TIES)
@pytest.mark.parametrize("scheme", NARROWABLE)
def test_narrow_is_the_rational_definition_for_every_code(scheme: str, ties: str) -> None:
    for high, low in ALL_PAIRS:
        codes = list(range(-(2 ** (high - 1)), 2 ** (high - 1)))
        expected = [narrow_one(c, high, low, scheme, ties) for c in codes]
        got = bf.narrow(torch.tensor(codes, dtype=torch.int8), high=high, low=low, scheme=scheme,
                        ties=ties)  # fmt: skip
        assert got.tolist() == expected, (high, low)
        assert got.dtype == torch.int8
        assert min(expected) >= -(2 ** (low - 1))
        assert max(expected) <= 2 ** (low - 1) - 1


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64])
def test_narrow_keeps_dtype_shape_and_its_argument(dtype: torch.dtype) -> None:
    codes = torch.arange(-128, 128, dtype=dtype).view(4, 8, 8).transpose(0, 2)
    before = codes.clone()
    for scheme in NARROWABLE:
        for low in (8, 4):
            got = bf.narrow(codes, high=8, low=low, scheme=scheme)
            assert got.dtype == dtype
            assert got.shape == codes.shape
            got.zero_()  # not a view of the stored codes, even where nothing is narrowed
            assert torch.equal(codes, before)


@pytest.mark.parametrize("codes", [np.zeros(3, np.int8), [1, 2, 3], 5])
def test_narrow_takes_tensors(codes: Any) -> None:
    with pytest.raises(ConfigError, match=rf"codes must be a torch tensor, got {type(codes).__name__}"):
        bf.narrow(codes, high=8, low=4)


@pytest.mark.parametrize("wrong", [8.0, True, "8", None, torch.tensor(8.0)], ids=str)
def test_widths_that_are_no_whole_numbers(wrong: Any) -> None:
    codes, scale = torch.zeros(3, dtype=torch.int8), torch.ones(1)
    for name in ("high", "low"):
        widths = {"high": 8, "low": 4, name: wrong}
        for call in (
            lambda widths=widths: bf.narrow(codes, **widths),
            lambda widths=widths: bf.fake_quantize(torch.zeros(3), scale, **widths),
        ):
            with pytest.raises(ConfigError, match=rf"{name}=.* must be a whole number of bits, such as 8"):
                call()
    for call in (
        lambda: bf.quantize(torch.zeros(3), scale, bits=wrong),
        lambda: bf.quantize_activation(torch.zeros(3), scale, bits=wrong, kind="signed"),
    ):
        with pytest.raises(ConfigError, match=r"bits=.* must be a whole number of bits"):
            call()


def test_widths_may_be_whole_numbers_of_numpy() -> None:
    codes = torch.arange(-128, 128, dtype=torch.int16).to(torch.int8)
    assert torch.equal(bf.narrow(codes, high=np.int64(8), low=np.int64(4)), bf.narrow(codes, high=8, low=4))


def test_narrow_of_nothing_is_nothing() -> None:
    empty = torch.zeros(0, 3, dtype=torch.int8)
    assert bf.narrow(empty, high=8, low=2).shape == (0, 3)


INT8 = torch.arange(-128, 128, dtype=torch.int8)


@pytest.mark.parametrize(("low", "percent"), [(7, 25.0), (6, 12.5), (4, 3.125), (2, 0.78125)])
def test_tie_rules_differ_on_the_known_share_of_int8_codes(low: int, percent: float) -> None:
    even = bf.narrow(INT8, high=8, low=low, ties="even")
    up = bf.narrow(INT8, high=8, low=low, ties="up")
    assert (even != up).sum().item() / 256 * 100 == percent


@pytest.mark.parametrize(("low", "percent"), [(4, 3.125), (2, 12.5)])
@pytest.mark.parametrize("ties", TIES)
def test_the_known_share_of_int8_codes_overflows(low: int, percent: float, ties: str) -> None:
    """Codes that round above the top level, and so read as the top level."""
    top = 2 ** (low - 1) - 1
    over = INT8.double() / 2 ** (8 - low) >= top + 0.5  # the tie at the top rounds up in both rules
    assert over.double().mean().item() * 100 == percent
    assert bool((bf.narrow(INT8, high=8, low=low, ties=ties)[over] == top).all())


def test_narrowing_in_steps_is_not_narrowing() -> None:
    at6 = bf.narrow(INT8, high=8, low=6)
    stepped = bf.narrow(at6, high=6, low=4)
    assert (stepped != bf.narrow(INT8, high=8, low=4)).sum().item() == 30


@pytest.mark.parametrize("scheme", ["nested", "nested+8", "centred", "truncate", "adabits"])
def test_floors_may_be_taken_in_steps(scheme: str) -> None:
    at6 = bf.narrow(INT8, high=8, low=6, scheme=scheme)
    stepped = bf.narrow(at6, high=6, low=4, scheme=scheme)
    assert torch.equal(stepped, bf.narrow(INT8, high=8, low=4, scheme=scheme))


# --- nested: every stored code, width and phase -------------------------------------------------


def test_every_stored_code_width_and_phase_of_nested() -> None:
    seen = 0
    for high, low in ALL_PAIRS:
        shift, step = high - low, torch.tensor([0.75])  # two bits of mantissa: products are exact
        for phase in PHASES:
            if not phase_fits(phase, high):
                continue
            seen += 1
            name = nested(phase)
            rule = bf.scheme_of(name)
            stored = list(stored_codes(high, phase))
            assert rule.stored_range(high) == (stored[0], stored[-1])
            codes = bf.narrow(torch.tensor(stored, dtype=torch.int8), high=high, low=low, scheme=name)
            # the low code is the first `low` of the `high` bits
            prefixes = [format(c % 2**high, f"0{high}b")[:low] for c in stored]
            assert [format(c % 2**low, f"0{low}b") for c in codes.tolist()] == prefixes
            values = [nested_value(c, high, low, phase) for c in stored]
            where = (high, low, phase)
            got = bf.dequantize(codes.view(1, -1), step, shift=shift, scheme=name)
            assert got[0].tolist() == [float(v) * 0.75 for v in values], where
            # (code + offset) * 2^shift, and factor * code + addend whole steps of the stored codes
            assert [(c + Fraction(rule.offset(shift))) * 2**shift for c in codes.tolist()] == values, where
            factor, addend = rule.integers(shift)
            integers = [factor * c + addend for c in codes.tolist()]
            assert factor == 2**shift, where
            assert integers == values, where
            assert -128 <= min(integers) <= max(integers) <= 127
            assert rule.fits_int8(low)
    assert seen > 100


def test_a_phase_of_half_a_cell_gives_that_width_a_zero() -> None:
    for shift in range(1, 7):
        values = {nested_value(c, 8, 8 - shift, 2 ** (shift - 1)) for c in stored_codes(8, 2 ** (shift - 1))}
        codes = torch.arange(-128 + 2 ** (shift - 1), 128, dtype=torch.int8).view(1, -1)
        name = f"nested+{2 ** (shift - 1)}"
        low = bf.narrow(codes, high=8, low=8 - shift, scheme=name)
        assert 0.0 in bf.dequantize(low, torch.ones(1), shift=shift, scheme=name)
        assert 0 in values
        assert 0.0 not in bf.dequantize(low, torch.ones(1), shift=shift, scheme="nested")


def test_nested_is_plain_on_top() -> None:
    rule = bf.scheme_of("nested")
    assert rule.offset(0) == 0.0
    assert rule.integers(0) == (1, 0)
    assert bf.scheme_of("nested+8").integers(0) == (1, -8)


def test_a_phase_is_refused_exactly_where_it_does_not_fit() -> None:
    for high in range(2, 9):
        for phase in range(1, 128):
            if phase_fits(phase, high):
                bf.check_phase(f"nested+{phase}", high)
                continue
            message = rf"'nested\+{phase}': a phase of {phase} does not fit {high}-bit codes"
            with pytest.raises(ConfigError, match=message) as caught:
                bf.check_phase(f"nested+{phase}", high)
            if high > 2:  # what the message proposes fits
                most = int(str(caught.value).split("powers of two up to ")[1].split(" ")[0])
                assert all(phase_fits(2**i, high) for i in range(8) if 2**i <= most)
        for scheme in bf.SCHEMES:
            bf.check_phase(scheme, high)


def test_what_does_not_fit_is_not_quantised() -> None:
    weight, scale = torch.ones(2, 2), torch.ones(2)
    bf.quantize(weight, scale, bits=8, scheme="nested+32")
    for call in (
        lambda: bf.quantize(weight, scale, bits=4, scheme="nested+32"),
        lambda: bf.fake_quantize(weight, scale, high=4, low=2, scheme="nested+32"),
    ):
        with pytest.raises(ConfigError, match="a phase of 32 does not fit 4-bit codes; powers of two up to 2 do"):
            call()


WRONG_NAMES: list[Any] = ["nested+0", "nested+-1", "nested+08", "truncate+8", "nested+", "nested+8 ", "nested +8",
                          "nested+1.0", "nested+\N{FULLWIDTH DIGIT EIGHT}", "nested+128", "nested+" + "9" * 5000,
                          "nested+8+8", "Nested", "", "+8", None, 8, ["nested"], {}]  # fmt: skip


def test_names_that_are_not_known_are_refused_with_those_that_are() -> None:
    for name in WRONG_NAMES:
        with pytest.raises(ConfigError, match=r"is not known; choose one of double_rounding, nested, .*'nested\+8'"):
            bf.scheme_of(name)


def test_every_name_gives_one_scheme() -> None:
    for name in (*bf.SCHEMES, "nested+1", "nested+127"):
        assert bf.scheme_of(name) is bf.scheme_of(name)
    assert len({bf.scheme_of(nested(phase)) for phase in range(128)}) == 128


# name: narrows, nests, shares a scale, a scale for each width, derives it, has ties, first goes down
FACTS = {
    "double_rounding": (True, False, True, False, False, True, False),
    "nested": (True, True, True, False, False, False, False),
    "nested+8": (True, True, True, False, False, False, False),
    "centred": (True, True, True, False, False, False, True),
    "truncate": (True, True, True, False, False, False, False),
    "adabits": (True, True, False, False, True, False, True),
    "lsq": (False, False, False, True, False, False, False),
    "dorefa": (False, False, False, False, True, False, False),
}


def test_what_a_scheme_says_of_itself() -> None:
    assert set(FACTS) - {"nested+8"} == set(bf.SCHEMES)
    for name, facts in FACTS.items():
        s = bf.scheme_of(name)
        found = (s.narrows, s.nests, s.shares_scale, s.has_scale_per_width, s.derives_scale, s.has_ties,
                 s.first_is_floor)  # fmt: skip
        assert found == facts, name
        expected = {"double_rounding": "nearest even", "lsq": None, "dorefa": None}.get(name, "floor")
        assert s.second_rounding("even") == expected
        assert s.fits_int8(7)
        assert s.fits_int8(8) == (name not in ("centred", "dorefa"))
        if name in ("centred", "dorefa"):  # the middle of a cell at every width, computed as 2 * code + 1
            assert {s.offset(shift) for shift in range(7)} == {0.5}
            assert {s.integers(shift) for shift in range(7)} == {(2, 1)}
        elif not name.startswith("nested"):
            assert {s.offset(shift) for shift in range(7)} == {0.0}
            assert {s.integers(shift) for shift in range(7)} == {(1, 0)}


def test_the_source_is_the_weight_or_its_tanh() -> None:
    weight = torch.linspace(-3, 3, 50)
    for name in FACTS:
        source = bf.scheme_of(name).source(weight)
        if name in ("adabits", "dorefa"):
            assert source.tolist() == np.tanh(weight.numpy().astype(np.float64)).astype(np.float32).tolist()
        else:
            assert source is weight


# --- small things -------------------------------------------------------------------------------


def test_lsq_gradient_scale() -> None:
    assert bf.lsq_gradient_scale(100, 2, signed=True) == pytest.approx(1 / math.sqrt(100 * 1))
    assert bf.lsq_gradient_scale(100, 2, signed=False) == pytest.approx(1 / math.sqrt(100 * 3))
    assert bf.lsq_gradient_scale(576, 8, signed=True) == pytest.approx(1 / math.sqrt(576 * 127))
    assert bf.lsq_gradient_scale(576, 8, signed=False) == pytest.approx(1 / math.sqrt(576 * 255))
    assert math.isfinite(bf.lsq_gradient_scale(0, 4, signed=True))  # an empty batch


@pytest.mark.parametrize(
    ("bits", "signed", "expected"),
    [(2, True, (-2, 1)), (3, True, (-4, 3)), (8, True, (-128, 127)), (2, False, (0, 3)),
     (8, False, (0, 255))],
)  # fmt: skip
def test_code_range(bits: int, signed: bool, expected: tuple[int, int]) -> None:
    assert bf.code_range(bits, signed=signed) == expected


W, C = torch.ones(2, 2), torch.ones(2, 2, dtype=torch.int8)

WRONG: dict[str, tuple[Callable[[], object], type[BitdialError], str]] = {
    "narrow high": (lambda: bf.narrow(C, high=9, low=4), ConfigError, "high=9"),
    "narrow low": (lambda: bf.narrow(C, high=8, low=1), ConfigError, "low=1"),
    "narrow wider": (lambda: bf.narrow(C, high=4, low=6), ConfigError, "high=4, low=6"),
    "narrow scheme": (lambda: bf.narrow(C, high=8, low=4, scheme="abc"), ConfigError, "'abc'"),
    "narrow ties": (lambda: bf.narrow(C, high=8, low=4, ties="odd"), ConfigError, "'odd'"),
    "narrow floats": (lambda: bf.narrow(W, high=8, low=4), ConfigError, "float32"),
    "narrow bools": (lambda: bf.narrow(C > 0, high=8, low=4), ConfigError, "bool"),
    "narrow outside": (
        lambda: bf.narrow(C * 8, high=4, low=2), QuantizationError, r"\[8, 8\].*\[-8, 7\]"),
    "narrow outside 8": (
        lambda: bf.narrow(C.int() * 128, high=8, low=2), QuantizationError, r"\[-128, 127\]"),
    "check_codes": (
        lambda: bf.check_codes(C * -1, bits=8, signed=False), QuantizationError, r"\[0, 255\]"),
}  # fmt: skip


def test_wrong_input_is_named() -> None:
    for function, error, message in WRONG.values():
        with pytest.raises(error, match=message):
            function()
