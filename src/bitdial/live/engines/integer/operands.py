"""What the operators take beside a layer's weight, for choices of widths: tables with a row for each choice."""

from collections.abc import Sequence

import torch
from torch import Tensor

from bitdial import functional as bf
from bitdial.kernels.epilogue import STORED_SHIFT
from bitdial.kernels.operands import PAD_CODES
from bitdial.live.codes import Codes

SUMMED_AT_ONCE = 1 << 16  # weight integers, which are made for that
Tables = dict[str, Tensor]  # (choices, ...) by the name of the buffer that holds the row in use


def needs_doubling(codes: Codes) -> bool:
    """Whether there is a width at which weight integers, 2 * code + 1, do not fit int8."""
    return not all(codes.rule.fits_int8(bits) for bits in codes.bit_choices)


def weight_operand(codes: Codes, bits: int) -> Tensor:
    """Integers (int8, in rows): the weight integers, or the codes where those do not fit."""
    fits = codes.rule.fits_int8(bits)
    return codes.weight_integers(bits).to(torch.int8) if fits else codes.weight_codes(bits)


def row_sums(codes: Codes, bits: int, rows: int) -> tuple[Tensor, Tensor]:
    """The sums (rows,), int32, of each row's weight integers, and the step (rows,); a few rows at a time."""
    size = max(1, SUMMED_AT_ONCE // max(codes.stored[0].numel(), 1))
    parts = (codes.weight_integers(bits, slice(at, at + size)) for at in range(0, rows, size))
    sums = torch.cat([part.flatten(1).sum(dim=1, dtype=torch.int32) for part in parts])
    return sums, codes.integer_step(bits).float().expand(sums.shape)


def quantizer(codes: Codes, bits: int) -> Tensor:
    """The numbers of the activations' quantizer (QUANTIZER_NUMBERS,) at `bits`.

    Where each token has a scale, the first is what its largest magnitude is multiplied with.
    """
    scale, zero_point = codes.act_parameters(bits)
    scale = bf.token_factor(scale, bits) if codes.is_dynamic else scale
    signed = codes.act_kind in bf.SIGNED_KINDS
    zero = torch.zeros_like(scale) if zero_point is None else bf.integer_zero_point(zero_point, bits)
    bounds = (*bf.code_range(bits, signed=signed), 0 if signed else STORED_SHIFT)
    return torch.cat([scale, zero, *(torch.full_like(scale, bound) for bound in bounds)]).float()


def act_tables(quantizers: Tensor) -> Tables:
    """What depends on the width of the activations: `quantizer` and `pad`."""
    pad = (quantizers[:, 1] - quantizers[:, 4]).to(torch.int8)
    return {"quantizer": quantizers, "pad": pad[:, None].expand(-1, PAD_CODES)}


def pair_tables(
    sums: Tensor, steps: Tensor, quantizers: Tensor, doubled: Sequence[bool] | None, *, dynamic: bool = False
) -> Tables:
    """What depends on both widths, a row for each pair, that of the activations changing first.

    `sums` and `steps` (widths, K), `quantizers` (widths, QUANTIZER_NUMBERS), `doubled` for each weight width or None.
    With `dynamic` activations the factor is the step alone: a token's scale is not known yet.
    """
    scales, zeros = quantizers[:, :1], (quantizers[:, 4:] - quantizers[:, 1:2]).int()
    scales = torch.ones_like(scales) if dynamic else scales
    tables = {
        "correction": (sums[:, None] * zeros).flatten(0, 1),
        "factor": (steps[:, None] * scales).flatten(0, 1),
    }
    if doubled is not None:
        flags = torch.tensor(doubled, dtype=torch.int32, device=sums.device)
        tables["doubled"] = flags.repeat_interleave(len(quantizers))[:, None]
    return tables
