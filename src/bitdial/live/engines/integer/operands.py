"""What the operators take beside a layer's weight, for choices of widths: tables with a row for each choice."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from bitdial import functional as bf
from bitdial.kernels.epilogue import STORED_SHIFT
from bitdial.kernels.operands import PAD_CODES

Tables = dict[str, Tensor]  # (choices, ...) by the name of the buffer that holds the row in use


class Operated(Protocol):
    """What is asked of a layer: see PackedLayer and IntegerLayer."""

    scheme: str
    act_kind: str
    bit_choices: tuple[int, ...]

    def weight_codes(self, bits: int) -> tuple[Tensor, Tensor]: ...

    def weight_integers(self, bits: int) -> tuple[Tensor, Tensor]: ...

    def act_parameters(self, bits: int | None = None) -> tuple[Tensor, Tensor | None]: ...

    def filters(self, codes: Tensor) -> Tensor: ...


def needs_halves(layer: Operated) -> bool:
    """Whether there is a width at which weight integers, 2 * code + 1, do not fit int8."""
    return not all(bf.scheme_of(layer.scheme).fits_int8(bits) for bits in layer.bit_choices)


def weight_operand(layer: Operated, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Integers (K, R, S, C / groups), int8; of those that they stand for the sums (K,), int32, and the step (K,)."""
    whole, step = layer.weight_integers(bits)
    sums = whole.flatten(1).sum(dim=1, dtype=torch.int32)
    integers = whole if bf.scheme_of(layer.scheme).fits_int8(bits) else layer.weight_codes(bits)[0]
    return layer.filters(integers.to(torch.int8)), sums, step.float().expand(sums.shape)


def quantizer(layer: Operated, bits: int) -> Tensor:
    """The numbers of the activations' quantizer (QUANTIZER_NUMBERS,) at `bits`."""
    scale, zero_point = layer.act_parameters(bits)
    signed = layer.act_kind == "signed"
    zero = torch.zeros_like(scale) if zero_point is None else bf.integer_zero_point(zero_point, bits)
    bounds = (*bf.code_range(bits, signed=signed), 0 if signed else STORED_SHIFT)
    return torch.cat([scale, zero, *(torch.full_like(scale, bound) for bound in bounds)]).float()


def act_tables(quantizers: Tensor) -> Tables:
    """What depends on the width of the activations: `quantizer` and `pad`."""
    pad = (quantizers[:, 1] - quantizers[:, 4]).to(torch.int8)
    return {"quantizer": quantizers, "pad": pad[:, None].expand(-1, PAD_CODES)}


def pair_tables(sums: Tensor, steps: Tensor, quantizers: Tensor, halves: Sequence[bool] | None) -> Tables:
    """What depends on both widths, a row for each pair, that of the activations changing first.

    `sums` and `steps` (widths, K), `quantizers` (widths, QUANTIZER_NUMBERS), `halves` for each weight width or None.
    """
    scales, zeros = quantizers[:, :1], (quantizers[:, 4:] - quantizers[:, 1:2]).int()
    tables = {
        "correction": (sums[:, None] * zeros).flatten(0, 1),
        "factor": (steps[:, None] * scales).flatten(0, 1),
    }
    if halves is not None:
        flags = torch.tensor(halves, dtype=torch.int32, device=sums.device)
        tables["halves"] = flags.repeat_interleave(len(quantizers))[:, None]
    return tables
