"""Linear layers that read packed weights: 2 to 8 bits a weight, activations in bf16 or fp16, on the CPU also float32.

    y = x @ ((c + offset) * scale * 2^shift).T + bias          shift = high - bits

with c the `bits`-bit codes, offset and scale as `bitdial.functional` defines them. A scale belongs to a row, or to a
group of neighbouring inputs of a row; then it is the row's scale times a number for each group.

Numbers c + offset are exact in both types, so are their products with x in float32. What is rounded: the float32 sums,
in an order that is fixed by the shapes; a group's sum times its scale; the product with the row's scale; the result.
Against float64:

    |y - exact| <= u |exact| + columns * 2^-23 * sum |x * w|        u = 2^-8 for bf16, 2^-11 for fp16

with groups or without: a sum of `columns` products by way of groups has no more roundings than one without, and
those of the two scales are among the first few of `columns`, which are at least 64 where there are groups.

On the CPU two terms come on top, see `kernels/cpu`:

    2^-29 * largest |x| of the token * sum |w|      since a token is put in fixed point
    u |exact + error so far|                        for up to 16 tokens in bf16 at up to 4 bits, in layers of whole 16
                                                    rows: PyTorch's product rounds to bf16 before the row's scale

Inputs may be float32 there, with u = 2^-24. The reference, which serves wherever no backend does, sums in float64 and
rounds once.

    scale, group_scale = packed_scales(row_scale, multipliers, columns=4096)       # once, multipliers (rows, groups)
    words = pack_words(codes, packed_fields(4))                                    # once
    y = packed_linear(x, words, scale, None, (4,), 4, 8, 0.0, group_scale)
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bitdial.errors import QuantizationError
from bitdial.kernels import dispatch
from bitdial.kernels.cpu.ops import packed_linear as cpu_kernel
from bitdial.kernels.ops import PACKED, declare
from bitdial.kernels.reference import packed_linear as reference
from bitdial.kernels.word_layout import TILE_COLUMNS, TILE_ROWS, pack_scales, words_shape

DTYPES = (torch.bfloat16, torch.float16)
_DTYPES_ON = {"cpu": (*DTYPES, torch.float32)}


def dtypes_on(device: torch.device) -> tuple[torch.dtype, ...]:
    """The types that inputs on `device` may have."""
    return _DTYPES_ON.get(device.type, DTYPES)


def packed_scales(scale: Tensor, group_scale: Tensor | None = None, *, columns: int) -> tuple[Tensor, Tensor | None]:
    """(scale, group_scale) as `packed_linear` takes them, of a weight with `columns` columns.

    From `scale` (rows,) alone, a scale for each row; from that and multipliers `group_scale` (rows, groups), uint8,
    scales of two levels; or from `scale` (rows, groups), float32, any scales of groups. Two levels are a byte to read
    for a group instead of four. Groups have a multiple of 32 columns, all of them as many; others are refused.
    """
    if scale.dtype != torch.float32 or scale.dim() not in (1, 2) or (scale.dim() == 2 and group_scale is not None):
        raise QuantizationError(
            f"scale is {scale.dtype} {tuple(scale.shape)}, expected torch.float32 (rows,), or (rows, groups) on its own"
        )
    if group_scale is not None and (group_scale.dtype != torch.uint8 or len(group_scale) != len(scale)):
        found = f"{group_scale.dtype} {tuple(group_scale.shape)}"
        raise QuantizationError(f"group_scale is {found}, expected torch.uint8 ({len(scale)}, groups)")
    if scale.dim() == 1:
        return scale, None if group_scale is None else pack_scales(group_scale, columns)
    if scale.shape[1] == 1:
        return scale.reshape(-1), None
    return torch.ones_like(scale[:, 0]), pack_scales(scale, columns)


def _checked(
    x: Tensor, words: Tensor, scale: Tensor, bias: Tensor | None, fields: Sequence[int], *how: Any
) -> tuple[Any, ...]:
    """The arguments of the operator, all of them; what would be read past its end is refused."""
    bits, high, offset, *rest = how
    group_scale = rest[0] if rest else None
    _check(x, words, scale, fields, group_scale)
    return x, words, scale, bias, fields, bits, high, offset, group_scale


def _check(x: Tensor, words: Tensor, scale: Tensor, fields: Sequence[int], group_scale: Tensor | None) -> None:
    """Refuse what would be read past its end, or as something else."""
    if x.dim() != 2 or x.dtype not in dtypes_on(x.device):
        types = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes_on(x.device))
        raise QuantizationError(f"x is {x.dtype} {tuple(x.shape)}, expected one of {types} (tokens, columns)")
    shape = words_shape(fields, scale.shape[0], x.shape[1])
    if words.shape != shape or words.dtype != torch.int32 or not (words.is_contiguous() or words[0].is_contiguous()):
        found = f"{words.dtype} {tuple(words.shape)}"
        raise QuantizationError(f"words are {found}, expected torch.int32 {shape}, each plane contiguous")
    if scale.dtype != torch.float32 or scale.dim() != 1 or not scale.is_contiguous():
        found = f"{scale.dtype} {tuple(scale.shape)}"
        raise QuantizationError(f"scale is {found}, expected torch.float32 (rows,): see packed_scales")
    if group_scale is None:
        return
    tiles, runs = (*shape[1:3], TILE_ROWS // 2), group_scale.shape[-2] if group_scale.dim() == 5 else 0
    fits = runs in (1, 2, 4, 8) and group_scale.shape == (*tiles, runs, 2) and group_scale.is_contiguous()
    if not fits or x.shape[1] * runs % TILE_COLUMNS or group_scale.dtype not in (torch.uint8, torch.float32):
        found = f"{group_scale.dtype} {tuple(group_scale.shape)}"
        raise QuantizationError(f"group_scale is {found}, not that of a weight of these words: see packed_scales")


def _fake(
    x: Tensor,
    words: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    fields: Sequence[int],
    bits: int,
    high: int,
    offset: float,
    group_scale: Tensor | None,
) -> Tensor:
    return x.new_empty((x.shape[0], scale.shape[0]))


packed_linear: Callable[..., Tensor] = declare(
    "packed_linear(Tensor x, Tensor words, Tensor scale, Tensor? bias, SymInt[] fields, SymInt bits, SymInt high, "
    "float offset, Tensor? group_scale=None) -> Tensor",
    records=_checked, fake=_fake, reference=reference.packed_linear, backends=PACKED,
)  # fmt: skip
"""x (tokens, columns) times a packed weight (rows, columns) read at `bits` bits: (tokens, rows), in x's type.

`words` as `word_layout` draws them, in `fields`, or whole row tiles of such; `scale` (rows,), float32, of one step at
`high` bits, and `group_scale` as `packed_scales` makes them; `offset` is what the scheme adds to a code of that width.
"""


def product(
    x: Tensor,
    words: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    fields: tuple[int, ...],
    bits: int,
    high: int,
    offset: float,
    group_scale: Tensor | None,
) -> Tensor:
    """`packed_linear` of arguments that fit, for a layer that runs eagerly.

    On a CPU a token's way through PyTorch's dispatcher to a kernel in Python takes longer than its product. Where there
    is nobody to look on (a compiler, a mode, a transform, a gradient), the kernel is called as the function that it is.
    """
    if (
        torch.compiler.is_compiling()
        or not x.is_cpu
        or type(x) is not Tensor
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or (torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)))
        or dispatch.interpreted()
    ):
        return packed_linear(x, words, scale, bias, fields, bits, high, offset, group_scale)
    return cpu_kernel(x, words, scale, bias, fields, bits, high, offset, group_scale)


def _refuse_gradient(ctx: Any, *gradients: Any) -> None:
    raise QuantizationError(
        "packed_linear has no gradient, and one is asked for; train in front of a model on kernels='float'"
    )


torch.library.register_autograd("bitdial::packed_linear", _refuse_gradient)
