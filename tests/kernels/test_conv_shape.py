"""Sizes of convolutions, against PyTorch's."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from bitdial.kernels.conv_shape import ConvShape, conv_shape, output_size

pairs = {name: st.tuples(st.integers(low, high), st.integers(low, high)) for name, low, high in (
    ("filter", 1, 4), ("stride", 1, 3), ("padding", 0, 3), ("dilation", 1, 3), ("extra", 0, 6),
)}  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(
    pairs["filter"], pairs["stride"], pairs["padding"], pairs["dilation"], pairs["extra"], st.sampled_from([1, 2, 4])
)
def test_the_output_has_the_sizes_of_pytorchs(filter_, stride, padding, dilation, extra, groups) -> None:
    reach = [d * (k - 1) + 1 for k, d in zip(filter_, dilation, strict=True)]
    height, width = (max(1, r - 2 * p) + e for r, p, e in zip(reach, padding, extra, strict=True))
    x, weight = torch.zeros(3, 4, height, width), torch.zeros(8, *filter_, 4 // groups)
    shape = conv_shape(x, weight, stride, padding, dilation, groups)
    y = F.conv2d(x, weight.permute(0, 3, 1, 2), None, stride, padding, dilation, groups)
    assert shape.output(3) == tuple(y.shape)
    assert shape == ConvShape.of((4, height, width), (8, *filter_), stride, padding, dilation, groups)
    assert shape.sizes == (height, width, 4, *y.shape[2:], 8, *filter_)
    assert shape.moves == (stride, padding, dilation, groups)


@pytest.mark.parametrize("channels, outputs, groups, depthwise", [(6, 6, 6, True), (6, 12, 6, False), (6, 6, 2, False)])
def test_depthwise_is_a_filter_for_each_channel(channels: int, outputs: int, groups: int, depthwise: bool) -> None:
    shape = ConvShape.of((channels, 5, 5), (outputs, 3, 3), (1, 1), (1, 1), groups=groups)
    assert shape.is_depthwise == depthwise


def test_sizes_by_hand() -> None:
    assert output_size(224, taps=7, stride=2, padding=3, dilation=1) == 112
    assert output_size(5, taps=3, stride=1, padding=0, dilation=2) == 1
    assert output_size(4, taps=3, stride=1, padding=0, dilation=2) == 0  # smaller than the filter
