"""Columns of a weight rounded one after the other by one kernel: a program has some rows, and goes through all columns.

A tile's gradients stay in registers. A program is one warp where that holds them, so that no step of its loop waits for
another warp; there are enough programs, since rows do not depend on each other.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bitdial.kernels.reference.rounding import Columns, Meanings

ROWS, FEWER_ROWS = 4, 2  # of a program: the fewer if a row has more than FEW gradients
FEW = 128
LEAST_COLUMNS = 32
WARP_HOLDS = 2048  # gradients
SIZES = ("groups", "rows", "columns", "codes", "runs")  # a kernel for all of them: to compile one takes a second


@triton.jit(do_not_specialize=SIZES)
def _round_columns(  # type: ignore[no-untyped-def]
    code_ptr,
    step_ptr,
    gradient_ptr,
    second_ptr,
    weight_ptr,
    value_ptr,
    run_ptr,
    best_ptr,
    groups,
    rows,
    columns,
    codes,
    runs,
    FINE: tl.constexpr,
    SETTINGS: tl.constexpr,
    ALL_SETTINGS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CODES: tl.constexpr,
    RUNS: tl.constexpr,
):
    group = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    setting, column, run = tl.arange(0, ALL_SETTINGS), tl.arange(0, COLUMNS), tl.arange(0, RUNS)
    live, is_setting = row < rows, setting < SETTINGS
    some = is_setting[:, None] & live[None, :]
    line = setting * groups + group
    place_of = (group * rows + row) * columns
    held_at = (line[:, None] * rows + row[None, :])[:, :, None] * columns + column[None, None, :]
    held_live = some[:, :, None] & (column < columns)[None, None, :]
    gradients = tl.load(gradient_ptr + held_at, mask=held_live, other=0.0)
    weights = tl.load(weight_ptr + line[:, None] * rows + row[None, :], mask=some, other=1.0)
    first = tl.load(run_ptr + run, mask=run < runs, other=0).to(tl.int32)
    last = tl.load(run_ptr + runs + run, mask=run < runs, other=0).to(tl.int32)
    first_value, last_value = tl.load(value_ptr + first), tl.load(value_ptr + last)
    code = tl.arange(0, CODES)
    below = tl.load(value_ptr + code, mask=code < codes - 1, other=float("inf"))
    middles = (tl.load(value_ptr + code + 1, mask=code < codes - 1, other=float("inf")) + below) / 2
    for place in range(columns):
        own = tl.load(code_ptr + place_of + place, mask=live, other=0).to(tl.int32)
        step = tl.load(step_ptr + place_of + place, mask=live, other=1.0)
        second_at = (line * columns + place) * columns
        curve = tl.load(second_ptr + second_at + place, mask=is_setting, other=1.0)
        held = tl.load(value_ptr + setting[:, None] * codes + own[None, :], mask=some, other=0.0)
        gradient = tl.sum(tl.where((column == place)[None, None, :], gradients, 0.0), axis=2)
        aims = held - tl.div_rn(gradient, curve[:, None] * step[None, :])
        slopes = weights * curve[:, None]
        if FINE:
            is_fine = (setting < FINE)[:, None]
            slope = tl.sum(tl.where(is_fine, slopes, 0.0), axis=0)
            aim = tl.div_rn(tl.sum(tl.where(is_fine, aims * slopes, 0.0), axis=0), slope)
            nearest = tl.sum((middles[None, :] < aim[:, None]).to(tl.int32), axis=1)
            value = tl.load(value_ptr + nearest)[:, None]
            value = tl.where(nearest[:, None] < first[None, :], first_value[None, :], value)
            value = tl.where(nearest[:, None] > last[None, :], last_value[None, :], value)
            apart = value - aim[:, None]
            cost = apart * apart * slope[:, None]
        else:
            nearest = own
            cost = tl.zeros((ROWS, RUNS), dtype=tl.float32)
        for coarse in tl.static_range(FINE, SETTINGS):
            is_it = (setting == coarse)[:, None]
            own_aim = tl.sum(tl.where(is_it, aims, 0.0), axis=0)
            own_slope = tl.sum(tl.where(is_it, slopes, 0.0), axis=0)
            apart = tl.load(value_ptr + coarse * codes + first)[None, :] - own_aim[:, None]
            cost += apart * apart * own_slope[:, None]
        chosen = tl.argmin(tl.where((run < runs)[None, :], cost, float("inf")), axis=1)
        known = chosen < runs
        least = tl.load(run_ptr + chosen, mask=known, other=0).to(tl.int32)
        most = tl.load(run_ptr + runs + chosen, mask=known, other=0).to(tl.int32)
        best = tl.minimum(tl.maximum(nearest, least), most)
        tl.store(best_ptr + place_of + place, best.to(tl.int64), mask=live)
        changed = tl.load(value_ptr + setting[:, None] * codes + best[None, :], mask=some, other=0.0)
        change = (changed - held) * step[None, :]
        own_second = tl.load(
            second_ptr + second_at[:, None] + column[None, :],
            mask=is_setting[:, None] & (column < columns)[None, :],
            other=0.0,
        )
        gradients += change[:, :, None] * own_second[:, None, :]
    tl.store(gradient_ptr + held_at, gradients, mask=held_live)


def round_columns(columns: Columns, meanings: Meanings) -> Tensor:
    """The codes of least error; `gradients`, dense in memory, are brought up to date in place."""
    codes, steps, gradients, second, weights = columns
    settings, groups, rows, count = gradients.shape
    assert gradients.is_contiguous()
    values = meanings.values.contiguous()
    best = torch.empty(codes.shape, dtype=torch.int64, device=codes.device)
    padded, width = triton.next_power_of_2(settings), max(LEAST_COLUMNS, triton.next_power_of_2(count))
    tile = ROWS if padded * width <= FEW else FEWER_ROWS
    runs = meanings.runs.contiguous()
    with torch.cuda.device_of(gradients):
        _round_columns[(triton.cdiv(rows, tile), groups)](
            codes.contiguous(), steps.contiguous(), gradients, second.contiguous(), weights.contiguous(), values,
            runs, best, groups, rows, count, values.shape[1], runs.shape[1], FINE=meanings.fine, SETTINGS=settings,
            ALL_SETTINGS=padded, ROWS=tile, COLUMNS=width, CODES=triton.next_power_of_2(values.shape[1]),
            RUNS=triton.next_power_of_2(runs.shape[1]), num_warps=max(1, min(8, padded * width * tile // WARP_HOLDS)),
        )  # fmt: skip
    return best
