"""Triton kernels of batch norm in training with all that follows it: residual, ReLU, quantizer, in one pass.

Memory is channels last, seen as (rows, channels). Forward, here: moments of tiles (often given by the convolution
before), a small kernel that joins them, and one pass that reads x and writes the value, its quantised form, or both.
Backward, in `norm_backward.py`: one pass that sums the gradients of the norm and of the quantizer's scale, a small
kernel that joins the sums, one pass that writes the gradient of x. What a gradient needs of the forward pass is
computed again, with the same operations in the same order, so that a code is the same both times.

Partial sums go to memory and are added in a fixed order: gradients repeat from run to run.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bitdial.kernels.triton.training.quantize import _act_range, _clip, _nearest, _ratio
from bitdial.kernels.width_table import ActivationCodes, first_row

ELEMENTS = 2048  # of a tile
WARPS = 4


@triton.jit
def _tile(rows, C, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):  # type: ignore[no-untyped-def]
    """Channels (BLOCK_C,), offsets and mask (BLOCK_R, BLOCK_C) of this program's tile."""
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    return c, r[:, None] * C + c[None, :], (r < rows)[:, None] & (c < C)[None, :]


@triton.jit
def _moments(x_ptr, out_ptr, rows, tiles, C, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):  # type: ignore[no-untyped-def]
    c, at, live = _tile(rows, C, BLOCK_R, BLOCK_C)
    tile = tl.program_id(0)
    x = tl.load(x_ptr + at, mask=live, other=0.0).to(tl.float32)
    mean = tl.sum(x, axis=0) / tl.minimum(rows - tile * BLOCK_R, BLOCK_R).to(tl.float32)
    off = tl.where(live, x - mean[None, :], 0.0)
    tl.store(out_ptr + c * tiles + tile, mean, mask=c < C)
    tl.store(out_ptr + (C + c) * tiles + tile, tl.sum(off * off, axis=0), mask=c < C)


@triton.jit
def _join_moments(  # type: ignore[no-untyped-def]
    moments_ptr,
    gamma_ptr,
    beta_ptr,
    running_mean_ptr,
    running_var_ptr,
    seen_ptr,
    out_ptr,
    rows,
    tiles,
    tile_rows,
    eps,
    momentum,
    C,
    BLOCK: tl.constexpr,
):
    c = tl.program_id(0)
    total = 0.0
    for start in range(0, tiles, BLOCK):
        at = start + tl.arange(0, BLOCK)
        count = tl.minimum(rows - at * tile_rows, tile_rows).to(tl.float32)
        total += tl.sum(tl.load(moments_ptr + c * tiles + at, mask=at < tiles, other=0.0) * count)
    mean = total / rows.to(tl.float32)
    squares = 0.0
    for start in range(0, tiles, BLOCK):
        at = start + tl.arange(0, BLOCK)
        live = at < tiles
        count = tl.minimum(rows - at * tile_rows, tile_rows).to(tl.float32)
        off = tl.load(moments_ptr + c * tiles + at, mask=live, other=0.0) - mean
        within = tl.load(moments_ptr + (C + c) * tiles + at, mask=live, other=0.0)
        squares += tl.sum(tl.where(live, within + count * off * off, 0.0))
    var = squares / rows.to(tl.float32)
    inverse = 1.0 / tl.sqrt(var + eps)
    slope = tl.load(gamma_ptr + c) * inverse
    tl.store(out_ptr + c, mean)
    tl.store(out_ptr + C + c, inverse)
    tl.store(out_ptr + 2 * C + c, slope)
    tl.store(out_ptr + 3 * C + c, tl.load(beta_ptr + c) - mean * slope)
    old_mean, old_var = tl.load(running_mean_ptr + c), tl.load(running_var_ptr + c)
    tl.store(running_mean_ptr + c, old_mean + momentum * (mean - old_mean))
    unbiased = squares / tl.maximum(rows - 1, 1).to(tl.float32)
    tl.store(running_var_ptr + c, old_var + momentum * (unbiased - old_var))
    if c == 0:
        tl.store(seen_ptr, tl.load(seen_ptr) + 1)


@triton.jit
def _value(x, slope, shift, residual, relu_max, RESIDUAL: tl.constexpr, RELU: tl.constexpr):  # type: ignore[no-untyped-def]
    v = tl.fma(x, slope, shift)
    if RESIDUAL:
        v += residual
    if RELU:
        v = _clip(v, 0.0, relu_max)
    return v


@triton.jit
def _codes(scale_ptr, table_ptr, choice_ptr, QUANTIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The scale and the range of the codes; anything if there are none."""
    scale, least, most = 1.0, 0.0, 0.0
    if QUANTIZE:
        scale = tl.load(scale_ptr)
        least, most = _act_range(table_ptr, choice_ptr)
    return scale, least, most


@triton.jit
def _apply(  # type: ignore[no-untyped-def]
    x_ptr,
    residual_ptr,
    norm_affine_ptr,
    scale_ptr,
    table_ptr,
    choice_ptr,
    value_ptr,
    quantized_ptr,
    rows,
    relu_max,
    C,
    RESIDUAL: tl.constexpr,
    RELU: tl.constexpr,
    KEEP_VALUE: tl.constexpr,
    QUANTIZE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    c, at, live = _tile(rows, C, BLOCK_R, BLOCK_C)
    slope = tl.load(norm_affine_ptr + 2 * C + c, mask=c < C, other=0.0)[None, :]
    shift = tl.load(norm_affine_ptr + 3 * C + c, mask=c < C, other=0.0)[None, :]
    x = tl.load(x_ptr + at, mask=live, other=0.0).to(tl.float32)
    residual = 0.0
    if RESIDUAL:
        residual = tl.load(residual_ptr + at, mask=live, other=0.0).to(tl.float32)
    v = _value(x, slope, shift, residual, relu_max, RESIDUAL, RELU).to(value_ptr.dtype.element_ty)
    if KEEP_VALUE:
        tl.store(value_ptr + at, v, mask=live)
    if QUANTIZE:
        scale, least, most = _codes(scale_ptr, table_ptr, choice_ptr, QUANTIZE)
        q = _nearest(_clip(_ratio(v.to(tl.float32), scale, least, most), least, most))
        tl.store(quantized_ptr + at, (q * scale).to(quantized_ptr.dtype.element_ty), mask=live)


# --- launches -------------------------------------------------------------------------------------


def tiling(x: Tensor) -> tuple[int, int, tuple[int, int], dict[str, int]]:
    """Rows, channels, grid and tile sizes."""
    channels = x.shape[1]
    rows = x.numel() // channels
    block_c = min(triton.next_power_of_2(channels), 64)
    block_r = ELEMENTS // block_c
    grid = (triton.cdiv(rows, block_r), triton.cdiv(channels, block_c))
    return rows, channels, grid, {"C": channels, "BLOCK_R": block_r, "BLOCK_C": block_c, "num_warps": WARPS}


def moments(x: Tensor) -> Tensor:
    """Mean and sum of squared deviations (2, channels, tiles) of each channel over each tile of rows."""
    rows, channels, grid, blocks = tiling(x)
    out = torch.empty((2, channels, grid[0]), dtype=torch.float32, device=x.device)
    _moments[grid](x, out, rows, grid[0], **blocks)
    return out


def norm_forward(
    x: Tensor,
    parts: Tensor,
    tile_rows: int,
    gamma: Tensor,
    beta: Tensor,
    running: tuple[Tensor, Tensor, Tensor],
    *,
    eps: float,
    momentum: float,
) -> Tensor:
    """Mean, 1 / deviation, slope and shift (4, channels) from the moments of tiles; updates the `running` ones."""
    channels, tiles = parts.shape[1:]
    out = torch.empty((4, channels), dtype=torch.float32, device=x.device)
    _join_moments[(channels,)](
        parts, gamma, beta, *running, out, x.numel() // channels, tiles, tile_rows, eps, momentum,
        C=channels, BLOCK=min(triton.next_power_of_2(tiles), 4096),
    )  # fmt: skip
    return out


def default_tile_rows(x: Tensor) -> int:
    """The rows of a tile of `moments(x)`."""
    return tiling(x)[3]["BLOCK_R"]


def pointers_of(codes: ActivationCodes | None, norm_affine: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scale, table and choice for a kernel; without codes it looks at none of them."""
    nothing = norm_affine, norm_affine, first_row(norm_affine.device)
    return nothing if codes is None else (codes.scale, *codes.dial)


def apply_forward(
    x: Tensor,
    norm_affine: Tensor,
    residual: Tensor | None,
    codes: ActivationCodes | None,
    *,
    relu_max: float | None,
    keep_value: bool,
    dtype: torch.dtype,
) -> tuple[Tensor | None, Tensor | None]:
    """The normalised value with `residual` added, clipped to [0, relu_max] (None: not at all), and its quantised form.

    The value is there if `keep_value`, the quantised form, in `dtype`, if there are `codes`.
    """
    rows, _, grid, blocks = tiling(x)
    value = torch.empty_like(x) if keep_value else None
    quantized = torch.empty_like(x, dtype=dtype) if codes is not None else None
    _apply[grid](
        x, x if residual is None else residual, norm_affine, *pointers_of(codes, norm_affine),
        x if value is None else value, x if quantized is None else quantized, rows,
        0.0 if relu_max is None else relu_max, RESIDUAL=residual is not None, RELU=relu_max is not None,
        KEEP_VALUE=keep_value, QUANTIZE=codes is not None, **blocks,
    )  # fmt: skip
    return value, quantized
