"""Products of bf16 tokens with codes of up to 4 bits, by PyTorch's own: half a byte a weight.

`torch.ops.aten._weight_int4pack_mm_for_cpu` multiplies with (q - 8) * s + z, q from 0 to 15, with s and z in bf16 for
each group of inputs of each row. Codes, offsets and whole multipliers fit s and z exactly; a row's float32 scale does
not, and comes behind the product. So nothing of the weight is rounded, but the output is: to bf16 by the product, and
again behind the scale.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

MOST_BITS = 4
MOST_TOKENS = 16  # of more, bytes are faster
_GROUPS = (256, 128, 64, 32)
_ROWS = 16  # of which there must be a multiple


@dataclass(frozen=True)
class NibbleLayout:
    """Codes in half bytes, and what makes values of them."""

    codes: Tensor  # as PyTorch wants them
    group: int
    scales_and_zeros: Tensor  # (groups, rows, 2), bf16
    step: Tensor  # (rows,), float32

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The products (tokens, rows) of the bf16 tokens x, plus the bias; rounded before the step and in the end."""
        y = torch.ops.aten._weight_int4pack_mm_for_cpu.default(x, self.codes, self.group, self.scales_and_zeros)
        if bias is None:
            return y.mul_(self.step)  # computed in float32, as PyTorch does where types differ
        return torch.mul(y, self.step).add_(bias).to(torch.bfloat16)

    def tensors(self) -> list[Tensor]:
        """All that it holds."""
        return [self.codes, self.scales_and_zeros, self.step]


def nibble_layout(codes: Tensor, multipliers: Tensor | None, offset: float, step: Tensor) -> NibbleLayout | None:
    """The layout of `codes` (rows, columns), with a multiplier for each run of a row; None where they do not fit."""
    rows, columns = codes.shape
    runs = multipliers.shape[1] if multipliers is not None else 0
    group = columns // runs if runs else next((size for size in _GROUPS if columns % size == 0), 0)
    if rows % _ROWS or group not in _GROUPS or columns % group or not product_is_right():
        return None
    scales = torch.ones(rows, columns // group) if multipliers is None else multipliers.float()
    both = torch.stack([scales, scales * offset], dim=2).transpose(0, 1).contiguous()
    if not torch.equal(both.bfloat16().float(), both):
        return None
    return NibbleLayout(_packed(codes), group, both.bfloat16(), step)


def _packed(codes: Tensor) -> Tensor:
    made: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32) + 8, 1)
    return made


@functools.cache
def product_is_right() -> bool:
    """Whether PyTorch's product is there, is a fast one, and computes what is said above."""
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return False
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-8, 8, (48, 96), generator=generator, dtype=torch.int8)
    both = torch.randint(-4, 5, (3, 48, 2), generator=generator).bfloat16()
    weight = codes.double().view(48, 3, 32) * both[..., 0].T[..., None] + both[..., 1].T[..., None]
    try:
        for tokens in (1, 3, 16):
            x = torch.randint(-2, 3, (tokens, 96), generator=generator).bfloat16()
            exact = x.double() @ weight.flatten(1).T
            y = torch.ops.aten._weight_int4pack_mm_for_cpu(x, _packed(codes), 32, both)
            if not torch.equal(y, exact.float().bfloat16()):
                return False
    except (AttributeError, RuntimeError):  # another PyTorch
        return False
    return True
