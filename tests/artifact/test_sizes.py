"""Bytes of the parts, against counts made by hand."""

from collections.abc import Callable
from pathlib import Path

import pytest

from bitdial import read_artifact
from bitdial.artifact import sizes

# The small model: conv 216 weights, depth 108, left 36 (right shares it); 6 output channels each, three biases of 6;
# norms of 4 and 6 features; float tensors stem 72, head 30 + 5, gain 5 (float32) and seen 2 (int64).
FLOAT = 4 * (72 + 30 + 5 + 5) + 8 * 2
BIASES = 3 * 6 * 4
NORM_SET = (4 + 6) * 4 * 4 + 2 * 8
WEIGHTS = (216, 108, 36)


def check(path: Path, *, codes: int, scales: int, widths: int, separate: dict[int, int]) -> None:
    found = sizes(read_artifact(path))
    tensors = codes + scales + widths * NORM_SET + FLOAT
    assert found == {
        "codes": codes,
        "scales": scales,
        "norms": widths * NORM_SET,
        "float": FLOAT,
        "tensors": tensors,
        "file": path.stat().st_size,
        "separate": separate,
        "norms_by_transitions": dict.fromkeys(("none", "full", "statistics"), widths * NORM_SET),  # the stem feeds conv
    }
    assert tensors < found["file"]


def test_eight_bits_per_channel(saved: Callable[..., Path]) -> None:
    one = BIASES + 3 * 6 * 4 + 4 * 4 + NORM_SET + FLOAT  # biases, weight scales, four activation scales
    check(
        saved(),
        codes=360,
        scales=BIASES + 3 * 6 * 4 + 4 * 4 * 4,
        widths=4,
        separate={8: 360 + one, 6: 162 + 81 + 27 + one, 4: 180 + one, 2: 90 + one},
    )


def test_packed_per_tensor_asymmetric(saved: Callable[..., Path]) -> None:
    one = BIASES + 3 * 4 + 4 * 5 + NORM_SET + FLOAT  # an activation has a scale and a zero-point
    check(
        saved(bit_choices=(3, 2), per_channel=False, activations="asymmetric"),
        codes=81 + 41 + 14,  # 648, 324 and 108 bits
        scales=BIASES + 3 * 4 + 4 * 2 * 5,
        widths=2,
        separate={3: 81 + 41 + 14 + one, 2: 54 + 27 + 9 + one},
    )


def test_weight_only(saved: Callable[..., Path]) -> None:
    one = BIASES + 3 * 6 * 4 + NORM_SET + FLOAT
    check(
        saved(bit_choices=(8, 5), activations="float"),
        codes=360,
        scales=BIASES + 3 * 6 * 4,
        widths=2,
        separate={8: 360 + one, 5: 135 + 68 + 23 + one},
    )


@pytest.mark.parametrize("scheme", ["lsq", "dorefa"])
def test_float_weights(saved: Callable[..., Path], scheme: str) -> None:
    one = BIASES + 3 * 6 * 4 + 4 * 4 + NORM_SET + FLOAT
    check(
        saved(scheme=scheme, bit_choices=(8, 4)),
        codes=4 * 360,
        scales=BIASES + 2 * 3 * 6 * 4 + 4 * 2 * 4,
        widths=2,
        separate={8: 360 + one, 4: 180 + one},
    )


def test_norms_that_are_not_switched_count_as_float(saved: Callable[..., Path]) -> None:
    found = sizes(read_artifact(saved(switch_norms=False)))
    assert found["norms"] == 0
    assert found["float"] == FLOAT + NORM_SET


def test_one_file_is_smaller_than_the_separate_ones(saved: Callable[..., Path]) -> None:
    found = sizes(read_artifact(saved(switch_norms=False)))
    assert found["tensors"] < sum(found["separate"].values())
    assert list(found["separate"]) == [8, 6, 4, 2]
    assert found["separate"][8] > found["separate"][6] > found["separate"][4] > found["separate"][2]
