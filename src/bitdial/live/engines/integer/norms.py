"""Batch norms on the integer engine: one multiplication and one addition, whose numbers lie ready for the kernels."""

from typing import Any, cast

import torch
from torch import Tensor, nn

from bitdial.kernels.epilogue import Epilogue
from bitdial.kernels.integer import run_epilogue
from bitdial.live.engines.exact import ExactNorm, norm_affine, plain_norm
from bitdial.live.engines.integer.operands import Tables
from bitdial.live.engines.integer.switchboard import BoardPart
from bitdial.live.plain import take_over
from bitdial.nn import SwitchableBatchNorm


def normalize(x: Tensor, affine: Tensor) -> Tensor:
    """x * multiplier + offset, each rounded once; `affine` (2, channels)."""
    if x.dim() in (2, 4) and x.dtype == torch.float32:
        return run_epilogue(x, Epilogue(norm_affine=affine))[0]
    multiplier, offset = (line.view(1, -1, *(1,) * (x.dim() - 2)) for line in affine)
    return x * multiplier + offset


class IntegerNorm(nn.Module):
    """One batch norm, in the place of the exact one; it has its parameters, statistics and hooks."""

    statistics_are_fixed = True
    affine_now: Tensor

    def __init__(self, norm: ExactNorm):
        super().__init__()
        take_over(self, norm)
        device = cast(Tensor, norm.running_mean).device
        self.register_buffer("affine_now", norm_affine(self).to(device), persistent=False)
        self.register_load_state_dict_post_hook(_refresh)

    def refresh(self) -> None:
        """Make multiplier and offset anew, in place."""
        self.affine_now.copy_(norm_affine(self))

    def forward(self, input: Tensor) -> Tensor:
        """The normalised input."""
        return normalize(input, self.affine_now)

    def plain(self) -> nn.Module:
        """The batch norm."""
        return plain_norm(self)


class NormOperands(BoardPart):
    """Multiplier and offset of the set in use, `affine_now` (2, channels), on the switchboard."""

    affine_now: Tensor

    def __init__(self, owner: nn.Module, norm: SwitchableBatchNorm):
        super().__init__(owner, ("bits", "fed_bits"), norm.bit_choices)
        selected = norm.bits, norm.fed_bits
        self.rows_of: dict[tuple[int, int], int] = {}
        for pair in ((own, fed) for own in norm.bit_choices for fed in norm.bit_choices):
            norm.select_set(*pair)
            self.rows_of[pair] = norm.set_names().index(norm.key)
        norm.select_set(*selected)

    def tables(self) -> list[Tables]:
        sets = cast(Any, self.owner).sets
        lines = [norm_affine(each) for each in sets.values()]
        device = next(iter(sets.values())).running_mean.device
        return [{"affine_now": torch.stack(lines).to(device)}]

    def wanted(self, first: int, second: int) -> list[int]:
        return [self.rows_of[first, second]]


class IntegerSwitchableNorm(nn.Module):
    """A batch norm with sets by widths, in the place of the float one: it has its `sets`, and says what is selected."""

    statistics_are_fixed = True
    fed_by: str | None = None
    bits: int
    fed_bits: int

    def __init__(self, norm: SwitchableBatchNorm):
        super().__init__()
        take_over(self, norm)
        self.plain_type = type(norm)
        self.operands = NormOperands(self, norm)
        self.register_load_state_dict_post_hook(_refresh)

    @property
    def affine_now(self) -> Tensor:
        """Multiplier and offset (2, channels) of the set in use."""
        return self.operands.affine_now

    def refresh(self) -> None:
        """Make the operands anew, in place."""
        assert self.operands.board is not None
        self.operands.board.reload(self.operands)

    def select_set(self, bits: int, fed_bits: int | None = None) -> None:
        """Change which set is in use."""
        assert self.operands.board is not None
        self.operands.board.select_alone(self.operands, bits, bits if fed_bits is None else fed_bits)

    def forward(self, input: Tensor) -> Tensor:
        """Normalise with the set in use."""
        return normalize(input, self.affine_now)

    def plain(self) -> nn.Module:
        """The float norm, at the same selection."""
        made: nn.Module = self.plain_type.__new__(self.plain_type)
        nn.Module.__init__(made)
        state = vars(self)
        for key in ("follows", "fed_by", "transitions", "shared", "bit_choices", "bits", "fed_bits", "training"):
            if key in state:
                setattr(made, key, state[key])
        made.sets = self.sets
        return made


def _refresh(norm: Any, keys: object) -> None:
    """After other statistics were loaded, what is made of them must follow."""
    norm.refresh()


def is_affine(norm: nn.Module) -> bool:
    """Whether `norm`, or each of its sets, is a batch norm with statistics: one multiplication and one addition.

    Norms of other classes may compute anything; they run as they are.
    """
    sets = norm.sets.values() if isinstance(norm, SwitchableBatchNorm) else [norm]
    exact = [each for each in sets if isinstance(each, ExactNorm)]
    return len(exact) == len(sets) and all(each.running_mean is not None for each in exact)
