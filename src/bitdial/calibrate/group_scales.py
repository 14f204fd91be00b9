"""Choose the scale of each group of inputs by what the layer gives, together with the codes of the group.

The scales that weights start from are the best ones for the nearest codes. Codes that are chosen by the layer's output
make up for each other, so others may suit them better. A two-level scale is a whole multiple of that of its row. So it
has few neighbours, and each can be tried: the codes of the group are rounded anew with it, against the present codes of
all other groups, and the multiple of least error is kept, row by row and group after group.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from bitdial import functional as bf
from bitdial.calibrate.rounding import Problem, Setting

TRIED = (-1, 1)  # what is added to a multiple


@torch.no_grad()
def choose_multiples(
    weight: Tensor,
    row_scale: Tensor,
    multiples: Tensor,
    codes: Tensor,
    settings: Sequence[Setting],
    *,
    tolerance: float,
) -> tuple[Tensor, Tensor]:
    """Multiples (groups, rows, runs) of `row_scale` (groups, rows) for runs of inputs, and codes that go with them.

    The others are as in `round_jointly`; a run is a group of inputs that share a scale.
    """
    problem, runs = Problem(weight, settings, tolerance), multiples.shape[2]
    multiples, codes = multiples.clone(), codes.clone()
    problem.start(codes, (row_scale[..., None] * multiples).repeat_interleave(weight.shape[2] // runs, dim=2))
    table = settings[0].values  # of the highest width
    energies = problem.squares.view(runs, -1)
    for run in energies.sum(dim=1).argsort(descending=True).tolist():
        columns = run * energies.shape[1] + energies[run].argsort(descending=True)
        own, held = codes[:, :, columns], multiples[:, :, run]
        best = held
        kept, changes, least = _tried(problem, columns, own, own, row_scale * held, row_scale * held)
        for added in TRIED:
            multiple = (held + added).clamp(1, bf.MOST_MULTIPLIER)
            rescaled = table[own] * (held / multiple)[..., None]
            start = torch.searchsorted((table[1:] + table[:-1]) / 2, rescaled)
            found, moves, cost = _tried(problem, columns, own, start, row_scale * held, row_scale * multiple)
            better = cost < least
            best, least = torch.where(better, multiple, best), torch.where(better, cost, least)
            kept = torch.where(better[..., None], found, kept)
            changes = torch.where(better[..., None], moves, changes)
        multiples[:, :, run], codes[:, :, columns] = best, kept
        problem.move(columns, changes)
    return multiples, codes


def _tried(
    problem: Problem, columns: Tensor, own: Tensor, start: Tensor, old: Tensor, new: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of `columns` with the scale `new` (groups, rows) in place of `old`, from the codes `start` on, not `own`.

    Also what they change at each setting, and what the errors change by (groups, rows).
    """
    steps, values = new[..., None].expand(own.shape), problem.values
    before, known = values[:, own] * old[..., None], problem.gradients.index_select(3, columns)
    gradients = known + (values[:, start] * steps - before) @ problem.among(columns)
    found = problem.rounded(columns, start, steps, gradients)
    changes = values[:, found] * steps - before
    cost = (problem.weights * (changes * (known + gradients)).sum(dim=3)).sum(dim=0)
    return found, changes, cost
