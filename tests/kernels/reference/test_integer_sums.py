"""Sums on the CPU of weights that stand for 2 * w + 1: parts that float32 has exactly, added and rounded once."""

import gc
import weakref

import pytest
import torch

from bitdial.kernels.conv_shape import ConvShape, conv_shape
from bitdial.kernels.reference import integer_sums


@pytest.mark.skipif(not integer_sums.qconv_is_exact(), reason="this CPU's convolution is not exact")
@pytest.mark.parametrize("zero", [-128, 0, 127])
@pytest.mark.parametrize("channels, parts", [(57, 1), (58, 2), (115, 4), (911, 16), (913, None)])
def test_sums_of_doubled_weights_in_parts(channels: int, parts: int | None, zero: int) -> None:
    """Sums of 9 * channels * 128 * 255 pass 2^24 at 58 channels and, in 16 parts, at 913; those of zero 0 later."""
    generator = torch.Generator().manual_seed(channels)
    weight = torch.randint(-128, 128, (6, 3, 3, channels), generator=generator, dtype=torch.int8)
    weight[0], weight[1] = -128, 127
    x = torch.randint(0, 256, (2, channels, 5, 4), generator=generator).to(torch.uint8)
    x[0] = 255 if zero < 0 else 0
    pad, shape = torch.tensor([zero], dtype=torch.int8), conv_shape(x, weight, (1, 1), (1, 1))
    found = integer_sums.exact_parts(weight, pad, 1)
    if zero:
        assert (found and len(found)) == parts
    if found is None:
        assert integer_sums.exact_parts(weight, pad, 1) is None, "kept"
        return
    twice = torch.tensor([1], dtype=torch.int32)
    expected = integer_sums.float64_sums(integer_sums.lowered(x), weight, pad, twice, shape)
    assert torch.equal(integer_sums.doubled_qconv_sums(x, found, pad, shape), expected.float())


def test_parts_of_a_weight_follow_it_and_do_not_keep_it() -> None:
    pad = torch.tensor([-128], dtype=torch.int8)
    weight = torch.zeros(2, 3, 3, 100, dtype=torch.int8)
    ((_, whole),) = integer_sums.exact_parts(weight, pad, 1) or []
    assert whole is weight
    weight.fill_(-128)
    found = integer_sums.exact_parts(weight, pad, 1)
    assert found is integer_sums.exact_parts(weight, pad, 1)
    assert [tuple(part.shape) for _, part in found or []] == [(2, 3, 3, 50)] * 2
    assert integer_sums.exact_parts(weight, pad, 2) is None, "groups are not cut"
    gone = weakref.ref(weight)
    del weight, whole, found
    gc.collect()
    assert gone() is None


@pytest.mark.skipif(not integer_sums.qconv_is_exact(), reason="this CPU's convolution is not exact")
def test_a_weight_is_arranged_for_the_sizes_it_meets_and_anew_when_it_changes() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-128, 128, (32, 1, 1, 16), generator=generator, dtype=torch.int8)
    pad, shape = torch.tensor([-128], dtype=torch.int8), ConvShape.of((16, 3, 3), (32, 1, 1), (1, 1), (0, 0))

    def kept() -> list[torch.Tensor]:
        return list(integer_sums._prepacked[weight][1].values())

    def run(samples: int) -> None:
        x = torch.randint(0, 256, (samples, 16, 3, 3), generator=generator).to(torch.uint8)
        expected = integer_sums.float64_sums(integer_sums.lowered(x), weight, pad, None, shape)
        assert torch.equal(integer_sums.qconv_sums(x, weight, pad, shape), expected.float())

    run(4)
    run(2)
    four, two = kept()
    run(4)
    assert [id(one) for one in kept()] == [id(two), id(four)], "both are still there, the last used last"
    run(1)
    assert [id(one) for one in kept()][:1] == [id(four)], "not for more than two sizes"
    assert len(kept()) == 2
    weight.neg_()
    run(4)
    assert len(kept()) == 1
