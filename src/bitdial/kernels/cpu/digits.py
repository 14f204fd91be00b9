"""Exact products of float inputs with integer weights, by integer products of bytes.

A token x is written in fixed point: x = i * unit, with whole numbers |i| < 2^30 and a power of two as its unit, so that
the largest number of the token has its leading bit at 2^29. A number i is four digits to the base 256, from -128 to
127. With weights that are bytes too, the sums of a digit's products are integer sums, which oneDNN computes exactly:

    x @ w.T = unit * (d0 @ w.T + 256 * d1 @ w.T + 65536 * d2 @ w.T + 2^24 * d3 @ w.T)

Weights of more bits are digits likewise: planes of the weight, as more rows. What is rounded: a number of x to a
multiple of its unit, toward zero (numbers from 2^-6 of the token's largest on have all their 24 bits; in bf16 those
from 2^-22 on); each sum and what is added up of them, in float32. So a result depends neither on the other tokens nor
on the number of threads.
"""

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

DIGITS, BASE = 4, 256
MOST_COLUMNS = (2**31 - 1) // (255 * 128)  # of an int32 sum
_LEADING = 29
_LEAST = 2.0**-96  # tokens of smaller numbers count as of these: units stay normal numbers
_EXPONENT = 0x7F800000
_RAISE = 0x80808080 - (1 << 32)  # brings every digit from -128..127 to 0..255


class Digits(NamedTuple):
    """Tokens in fixed point: digits plus 128 (4 * tokens, columns), uint8, the lowest first; units (tokens, 1).

    Of one token the unit may be a number. `finite` says whether all numbers are; the digits of others mean nothing.
    """

    digits: Tensor
    unit: Tensor | float
    finite: bool


def digits_of(x: Tensor) -> Digits:
    """The tokens x (tokens, columns), contiguous and not empty, in fixed point."""
    tokens, columns = x.shape
    x = x.float() if x.dtype == torch.float16 else x  # whose largest number is 65,504; bf16 reaches as far as float32
    unit, inverse, finite = _unit_of_one(x) if tokens == 1 else _units(x)
    numbers = x.mul(inverse).to(torch.int32).add_(_RAISE)
    digits = numbers.view(torch.uint8).view(tokens, columns, DIGITS).permute(2, 0, 1)
    return Digits(digits.reshape(DIGITS * tokens, columns), unit, finite)


def _unit_of_one(x: Tensor) -> tuple[float, float, bool]:
    """The unit of one token, its inverse, and whether all numbers are finite. Python is faster at single numbers."""
    least, most = x.aminmax()
    largest = max(-least.item(), most.item())
    if not largest < math.inf:
        return 1.0, 1.0, False
    exponent = math.frexp(max(largest, _LEAST))[1] - 1 - _LEADING
    return 2.0**exponent, 2.0**-exponent, True


def _units(x: Tensor) -> tuple[Tensor, Tensor, bool]:
    """The same of several tokens."""
    largest = x.abs().amax(1, keepdim=True).float().clamp_min_(_LEAST)
    unit = ((largest.view(torch.int32) & _EXPONENT) - (_LEADING << 23)).view(torch.float32)
    return unit, unit.reciprocal().to(x.dtype), largest.max().item() < math.inf


def planes_of(integers: Tensor) -> Tensor:
    """`integers` (rows, columns), int32, as the fewest digits: (planes * rows, columns), int8, the lowest first."""
    planes: list[Tensor] = []
    rest = integers
    while not planes or bool(rest.any()):
        low = (rest + 128 & 255) - 128
        planes.append(low.to(torch.int8))
        rest = rest - low >> 8
    return torch.cat(planes)


def prepacked(planes: Tensor) -> Tensor:
    """`planes` as oneDNN wants them: an opaque tensor, a byte a number."""
    made: Tensor = torch.ops.onednn.qlinear_prepack(planes, None)
    return made


def digit_sums(digits: Tensor, weight: Tensor, step: Tensor) -> Tensor:
    """The int32 sums of `digits` with the `prepacked` rows, each times the row's step: float32, rounded twice."""
    sums: Tensor = torch.ops.onednn.qlinear_pointwise.default(
        digits, 1.0, 128, weight, step, _zeros(step.shape[0]), None, 1.0, 0, torch.float32, "none", [], ""
    )
    return sums


def added_up(parts: Tensor) -> Tensor:
    """parts[0] + 256 * parts[1] + ..., from the last one on; in a fixed order, whatever the shape."""
    *others, total = parts.unbind()
    for part in reversed(others):
        total = torch.add(part, total, alpha=BASE)
    return total


@functools.lru_cache(maxsize=64)
def _zeros(count: int) -> Tensor:
    with torch.inference_mode(False):
        return torch.zeros(count, dtype=torch.int64)


@functools.cache
def products_are_exact() -> bool:
    """Whether oneDNN's products of bytes are there and exact: instructions before VNNI add pairs in 16 bits."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-128, 128, (33, 200), generator=generator, dtype=torch.int8)
    weight[:16] = -128
    try:
        for tokens, value in ((4, 255), (4, 0), (9, 131)):
            x = torch.randint(0, 256, (tokens, 200), generator=generator, dtype=torch.uint8)
            x[:3] = value
            expected = ((x.double() - 128) @ weight.double().T).float()
            if not torch.equal(digit_sums(x, prepacked(weight), torch.ones(33)), expected):
                return False
    except (AttributeError, RuntimeError):  # a PyTorch without oneDNN, or of another signature
        return False
    return True
