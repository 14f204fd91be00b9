"""Triton kernels that drop a share of a tensor's elements: they take another tensor's there.

Which ones a byte of Philox's numbers decides, by a key (seed, iteration) in memory, the number of the draw and the
place of the element. A program has 16 runs of elements, one for each byte of four words. Backward draws the same again.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

LANES = 128  # elements of a run: one for each thread, so that words stay where they are drawn
RUNS = tl.constexpr(16)


@triton.jit
def _words(key_ptr, draw, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Four words for each lane of this program."""
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    iteration = tl.load(key_ptr + 1).to(tl.int32)
    nothing = tl.zeros_like(lane)
    return tl.philox(tl.load(key_ptr), lane, nothing + draw, nothing + iteration, nothing)


@triton.jit
def _run(one, two, three, four, run: tl.constexpr, most):  # type: ignore[no-untyped-def]
    """Which elements of a run are dropped."""
    if run // 4 == 0:
        word = one
    elif run // 4 == 1:
        word = two
    elif run // 4 == 2:
        word = three
    else:
        word = four
    return ((word >> (run % 4 * 8)) & 255).to(tl.int32) <= most


@triton.jit(do_not_specialize=["draw", "most"])
def _drop_forward(  # type: ignore[no-untyped-def]
    value_ptr,
    plain_ptr,
    out_ptr,
    key_ptr,
    draw,
    most,
    count,
    LANES: tl.constexpr,
):
    one, two, three, four = _words(key_ptr, draw, LANES)
    for run in tl.static_range(RUNS):
        at = (tl.program_id(0) * RUNS + run) * LANES + tl.arange(0, LANES)
        live = at < count
        value, plain = tl.load(value_ptr + at, mask=live, other=0.0), tl.load(plain_ptr + at, mask=live, other=0.0)
        tl.store(out_ptr + at, tl.where(_run(one, two, three, four, run, most), plain, value), mask=live)


@triton.jit(do_not_specialize=["draw", "most"])
def _drop_backward(  # type: ignore[no-untyped-def]
    grad_ptr,
    value_ptr,
    plain_ptr,
    key_ptr,
    draw,
    most,
    count,
    VALUE: tl.constexpr,
    PLAIN: tl.constexpr,
    LANES: tl.constexpr,
):
    one, two, three, four = _words(key_ptr, draw, LANES)
    for run in tl.static_range(RUNS):
        at = (tl.program_id(0) * RUNS + run) * LANES + tl.arange(0, LANES)
        live = at < count
        dropped = _run(one, two, three, four, run, most)
        grad = tl.load(grad_ptr + at, mask=live, other=0.0)
        if VALUE:
            tl.store(value_ptr + at, tl.where(dropped, 0.0, grad), mask=live)
        if PLAIN:
            tl.store(plain_ptr + at, tl.where(dropped, grad, 0.0), mask=live)


def _grid(count: int) -> tuple[int]:
    return (triton.cdiv(count, LANES * RUNS.value),)


def forward(value: Tensor, plain: Tensor, key: Tensor, draw: int, most: int) -> Tensor:
    """`value`, with elements of `plain` where a byte is at most `most`; both lie in memory alike."""
    out = torch.empty_like(value)
    _drop_forward[_grid(value.numel())](value, plain, out, key, draw, most, value.numel(), LANES=LANES)
    return out


def backward(
    grad: Tensor, key: Tensor, draw: int, most: int, *, wants: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of `value` and of `plain`; `wants` says which of them are wanted."""
    found = [torch.empty_like(grad) if wanted else None for wanted in wants]
    _drop_backward[_grid(grad.numel())](
        grad, *(grad if one is None else one for one in found), key, draw, most, grad.numel(),
        VALUE=wants[0], PLAIN=wants[1], LANES=LANES,
    )  # fmt: skip
    return found[0], found[1]
