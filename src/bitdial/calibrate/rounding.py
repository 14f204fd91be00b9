"""Round a weight for all widths at once: choose the one stored code of each weight by what the layer gives.

Rounding each weight to the nearest code is best for the weight, not for the layer. Inputs are correlated, so the error
of one weight can be made up for by others. GPTQ and its kin do so for one width. Here one code serves all widths: it is
chosen by the sum, over the widths, of the layer's error at each,

    sum over widths of  E|x_b (V_b - W_b)|^2 / (own error + tolerance)

with V_b what the codes mean at width b, x_b the layer's inputs in the model at width b, and W_b the weight that is best
for them: the float weight W, or what makes up for the change of the inputs, too (see `Target`). Each width counts by
its relative error, as in `reconstruct`.

It is minimised code by code (coordinate descent). For one weight, the others fixed, the error at each width is a
parabola over the values of its code. So the best of all codes is found exactly, for all rows at once, column after
column, in a few sweeps. Codes with the same values at all lower widths form a segment; in each, the code nearest to the
minimum of the highest width is the only candidate.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SWEEPS = 3
COLUMNS = 32  # that are rounded before the errors of all others are brought up to date
DAMPING = 0.01  # of the mean square of an input: keeps weights that the samples say little about near the float ones


class Target:
    """What a layer should give: x W, the outputs of the float model, though its inputs are x_b now.

    E|x_b V - x W|^2 = E|x_b (V - W_b)|^2 + E|r W|^2: the weight of least squares is W_b = W (1 + change). What x_b says
    nothing of, r, is there whatever the codes are. `rest` is the second moment of r.
    """

    def __init__(self, second: Tensor, moved: Tensor, moved_second: Tensor):
        """With d = x - x_b: `second` is that of x_b, `moved` the mean of d' x_b, `moved_second` that of d' d.

        All are (groups, inputs, inputs). They are taken from d, since what is left of a difference of large moments
        is rounding error where d is small, as at 8 bits.
        """
        factor = torch.linalg.cholesky(damped(second))
        self.change = torch.cholesky_solve(moved.transpose(1, 2), factor).transpose(1, 2)
        self.rest = moved_second - self.change @ moved.transpose(1, 2)


@dataclass(frozen=True)
class Setting:
    """What one setting of the dial asks of a layer.

    values      (codes,) what each code that can be stored is worth there, in steps of the stored codes
    second      (groups, inputs, inputs) second moments of the layer's inputs there: mean of x' x over rows x
    importance  of its relative error
    target      the outputs to come to; None: those of the float weight on the same inputs
    """

    values: Tensor
    second: Tensor
    importance: float = 1.0
    target: Target | None = None


def damped(second: Tensor) -> Tensor:
    """Second moments (groups, inputs, inputs) with a share of their mean square added to each."""
    made = second.clone()
    squares = made.diagonal(dim1=1, dim2=2)
    squares.add_(DAMPING * squares.mean(dim=1, keepdim=True) + 1e-12)
    return made


class _Term:
    """The error of one setting, (V - W_b) H (V - W_b)' + rest, and its gradient along the codes."""

    def __init__(self, setting: Setting, weight: Tensor):
        self.values, self.importance, self.wanted = setting.values, setting.importance, weight
        self.second = damped(setting.second)  # H
        self.diagonal = self.second.diagonal(dim1=1, dim2=2).contiguous()
        self.energy = (weight @ self.second).mul_(weight).sum(dim=2)
        self.rest = torch.zeros_like(self.energy)
        if (target := setting.target) is not None:
            self.wanted = weight + weight @ target.change
            self.rest = (weight @ target.rest).mul_(weight).sum(dim=2).clamp_min_(0)

    def start(self, codes: Tensor, scale: Tensor) -> None:
        """Half the gradient of the error at `codes`, and the error of each row (groups, rows)."""
        apart = self.values[codes] * scale - self.wanted
        self.gradient = apart @ self.second
        self.error = (apart * self.gradient).sum(dim=2) + self.rest

    def weigh(self, tolerance: float) -> None:
        """How much the error of each row weighs, (groups, rows): by its relative size."""
        self.weight = self.importance / (self.error.clamp_min(0) + tolerance * self.energy + 1e-30)


def segments(tables: Sequence[Tensor]) -> Tensor:
    """Runs of codes that have the same values in all `tables` (codes,): (2, runs), the first and last code of each."""
    count = len(tables[0])
    ends = torch.zeros(count, dtype=torch.bool)
    ends[-1] = True
    for table in tables:
        ends[:-1] |= (table[1:] != table[:-1]).cpu()
    last = ends.nonzero()[:, 0]
    return torch.stack([torch.cat([last.new_zeros(1), last[:-1] + 1]), last]).to(tables[0].device)


@torch.no_grad()
def round_jointly(
    weight: Tensor, scale: Tensor, codes: Tensor, settings: Sequence[Setting], *, tolerance: float
) -> Tensor:
    """Codes of `weight` (groups, rows, inputs) for all `settings`, as indices into their values, from `codes` on.

    `scale` (groups, rows, inputs) is that of each weight. Groups are those of a convolution; other layers have one.
    """
    problem = Problem(weight, settings, tolerance)
    codes = codes.clone()
    for _ in range(SWEEPS):
        problem.start(codes, scale)
        before = codes.clone()
        for columns in problem.order.split(COLUMNS):
            steps, own = scale[:, :, columns], codes[:, :, columns]
            gradients = [term.gradient[:, :, columns] for term in problem.terms]
            codes[:, :, columns] = best = problem.rounded(columns, own, steps, gradients)
            problem.move(columns, [(term.values[best] - term.values[own]) * steps for term in problem.terms])
        if torch.equal(before, codes):
            break
    return codes


class Problem:
    """The sum over all settings of the errors of a weight (groups, rows, inputs), about to be rounded."""

    def __init__(self, weight: Tensor, settings: Sequence[Setting], tolerance: float):
        terms = [_Term(setting, weight) for setting in settings]
        self.fine = [term for term in terms if bool((term.values[1:] > term.values[:-1]).all())]
        self.coarse = [term for term in terms if term not in self.fine]
        self.terms, self.tolerance = self.fine + self.coarse, tolerance
        nothing = terms[0].values.new_zeros(len(terms[0].values))
        self.runs = segments([term.values for term in self.coarse] or [nothing])
        self.squares = torch.stack([term.diagonal for term in terms]).mean(dim=(0, 1))  # (inputs,)
        self.order = self.squares.argsort(descending=True)

    def start(self, codes: Tensor, scale: Tensor) -> None:
        """Find errors and gradients at `codes`, and what each setting weighs from now on."""
        for term in self.terms:
            term.start(codes, scale)
            term.weigh(self.tolerance)

    def rounded(self, columns: Tensor, codes: Tensor, steps: Tensor, gradients: list[Tensor]) -> Tensor:
        """The codes (groups, rows, columns) of some `columns`, rounded anew one after the other from `codes` on.

        `steps` are their scales, `gradients` those of each term at `codes`, which are brought up to date in place.
        """
        codes = codes.clone()
        among = [term.second[:, columns][:, :, columns] for term in self.terms]
        for place, column in enumerate(columns.tolist()):
            step, own = steps[:, :, place], codes[:, :, place].clone()
            aims = []  # the minimum of each parabola, and how steep it is
            for term, gradient in zip(self.terms, gradients, strict=True):
                curve = term.diagonal[:, None, column]
                aims.append((term.values[own] - gradient[:, :, place] / (curve * step), term.weight * curve))
            codes[:, :, place] = best = self._best_codes(aims, own)
            for term, gradient, rows in zip(self.terms, gradients, among, strict=True):
                change = (term.values[best] - term.values[own]) * step
                gradient += change[:, :, None] * rows[:, None, place]
        return codes

    def move(self, columns: Tensor, changes: list[Tensor]) -> None:
        """Let the gradients know of `changes` (groups, rows, columns) of what each term makes of the weight."""
        for term, change in zip(self.terms, changes, strict=True):
            term.gradient += change @ term.second[:, columns]

    def _best_codes(self, aims: list[tuple[Tensor, Tensor]], own: Tensor) -> Tensor:
        """The codes (groups, rows) of least error: in each run the one nearest to the aim of the highest width."""
        runs, fine, coarse = self.runs, aims[: len(self.fine)], aims[len(self.fine) :]
        if fine:
            slope = torch.stack([steepness for _, steepness in fine]).sum(dim=0)
            aim = torch.stack([aim * steepness for aim, steepness in fine]).sum(dim=0) / slope
            table = self.fine[0].values
            nearest = torch.searchsorted((table[1:] + table[:-1]) / 2, aim.contiguous())
            candidates = nearest[..., None].clamp(runs[0], runs[1])
            cost = (table[candidates] - aim[..., None]).square_().mul_(slope[..., None])
        else:
            candidates = own[..., None].clamp(runs[0], runs[1])
            cost = torch.zeros(candidates.shape, device=own.device)
        for (aim, steepness), term in zip(coarse, self.coarse, strict=True):
            cost += (term.values[runs[0]] - aim[..., None]).square_().mul_(steepness[..., None])
        return candidates.gather(-1, cost.argmin(dim=-1, keepdim=True))[..., 0]
