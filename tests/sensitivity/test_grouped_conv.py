"""Grouped convolutions that differentiate twice without a loop: against PyTorch's own, in float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from bitdial.sensitivity.grouped_conv import GroupsAtOnce

CONVS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def differentiate_twice(convolve: Callable[..., Tensor], leaves: list[Tensor]) -> list[Tensor]:
    """The value, its gradient in each leaf, and the gradient of a function of these in each leaf.

    A sine has bounded derivatives: they do not make more of a value's last bit, which depends on the order of sums.
    """
    value = convolve(*leaves)
    first = torch.autograd.grad(value.sin().sum(), leaves, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), leaves)
    return [value, *first, *second]


def compare(convolve: Callable[..., Tensor], leaves: list[Tensor]) -> None:
    expected = differentiate_twice(convolve, leaves)
    with GroupsAtOnce():
        found = differentiate_twice(convolve, leaves)
    assert any("_Derivative" in name for name in nodes(found[0])), "or PyTorch is compared with itself"
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12 * float(theirs.detach().abs().max()))


def nodes(value: Tensor) -> set[str]:
    """The names of all nodes of the graph behind a value."""
    found, pending = set(), [value.grad_fn]
    while pending:
        if (node := pending.pop()) is not None:
            found.add(node.name())
            pending += [inner for inner, _ in node.next_functions]
    return found


@st.composite
def geometries(draw: Any) -> tuple[int, dict[str, Any], list[tuple[int, ...]]]:
    """Dimensions, settings of a grouped convolution, and the shapes of its input, weight and, if any, bias."""
    dims, groups = draw(st.integers(1, 3)), draw(st.integers(2, 4))
    each = draw(st.integers(1, 3))  # input channels of a group; with 1 a depthwise convolution
    out = groups * draw(st.integers(1, 3))
    kernel = draw(st.lists(st.integers(1, 3), min_size=dims, max_size=dims))
    padding = draw(st.one_of(st.sampled_from(["same", "valid"]), per_dimension(dims, 0, 2)))
    stride = 1 if padding == "same" else draw(per_dimension(dims, 1, 3))
    dilation = draw(per_dimension(dims, 1, 2))
    sizes = draw(st.lists(st.integers(5, 7), min_size=dims, max_size=dims))  # 5: the reach of 3 taps, 2 apart
    batch = draw(st.sampled_from([(), (1,), (3,)]))
    shapes = [(*batch, groups * each, *sizes), (out, each, *kernel), *([(out,)] if draw(st.booleans()) else [])]
    return dims, {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}, shapes


def per_dimension(dims: int, least: int, most: int) -> Any:
    number = st.integers(least, most)
    return st.one_of(number, st.lists(number, min_size=1, max_size=1), st.lists(number, min_size=dims, max_size=dims))


@settings(max_examples=100, deadline=None)
@given(geometries(), st.integers(0, 1000))
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
def test_value_and_both_derivatives_are_those_of_pytorch(geometry: Any, seed: int) -> None:
    dims, arguments, shapes = geometry
    leaves = [drawn(*shape, seed=seed + i) for i, shape in enumerate(shapes)]
    compare(lambda *tensors: CONVS[dims](*tensors, **arguments), leaves)


def test_a_third_derivative_too() -> None:
    x, w = drawn(1, 4, 3, 3, seed=0), drawn(4, 2, 2, 2, seed=1)

    def third() -> tuple[Tensor, ...]:
        first = torch.autograd.grad(F.conv2d(x, w, groups=2).sin().sum(), [x, w], create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), [x, w], create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in second), [x, w])

    expected = third()
    with GroupsAtOnce():
        torch.testing.assert_close(third(), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("which", [0, 1])
def test_one_operand_alone_takes_gradients(which: int) -> None:
    leaves = [drawn(2, 6, 5, 5, seed=0), drawn(6, 1, 3, 3, seed=1)]
    other = leaves.pop(1 - which).detach()

    def convolve(leaf: Tensor) -> Tensor:
        return F.conv2d(*((leaf, other) if which == 0 else (other, leaf)), groups=6)

    compare(convolve, leaves)


def test_a_checkpointed_part_of_a_model() -> None:
    """It runs again as it is differentiated, outside of the context."""
    leaves = [drawn(2, 6, 5, 5, seed=0), drawn(6, 1, 2, 3, seed=1), drawn(6, seed=2)]

    def convolve(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.conv2d(x, w, b, padding=1, groups=6).tanh()

    compare(lambda *tensors: checkpoint(convolve, *tensors, use_reentrant=False), leaves)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_ungrouped_and_complex_convolutions_stay_pytorchs(dtype: torch.dtype) -> None:
    groups = 2 if dtype.is_complex else 1
    x, w = drawn(1, 4, 5, 5, seed=0, dtype=dtype), drawn(4, 4 // groups, 3, 3, seed=1, dtype=dtype)
    expected = F.conv2d(x, w, groups=groups)
    with GroupsAtOnce():
        found = F.conv2d(x, w, groups=groups)
    assert torch.equal(found, expected)
    assert nodes(found) == nodes(expected)


def test_so_do_those_under_autocast() -> None:
    x, w = drawn(1, 4, 5, 5, seed=0, dtype=torch.float32), drawn(4, 2, 3, 3, seed=1, dtype=torch.float32)
    with GroupsAtOnce(), torch.autocast("cpu", dtype=torch.float16):
        found = F.conv2d(x, w, groups=2)
    assert found.dtype == torch.float16
    torch.autograd.grad(found.sum(), [x, w])
    assert not any("_Derivative" in name for name in nodes(found))


def test_a_wrong_shape_is_refused() -> None:
    with GroupsAtOnce(), pytest.raises(RuntimeError, match="channels"):
        F.conv2d(torch.zeros(1, 5, 4, 4), torch.zeros(4, 2, 3, 3), groups=2)
