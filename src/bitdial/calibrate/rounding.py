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

from bitdial.kernels.rounding import Columns, Meanings, round_columns

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
    """Second moments (..., inputs, inputs) with a share of their mean square added to each."""
    return _damp(second.clone())


def _damp(second: Tensor) -> Tensor:
    squares = second.diagonal(dim1=-2, dim2=-1)
    squares.add_(DAMPING * squares.mean(dim=-1, keepdim=True) + 1e-12)
    return second


def segments(tables: Sequence[Tensor]) -> Tensor:
    """Runs of codes that have the same values in all `tables` (codes,): (2, runs), the first and last code of each."""
    values = torch.stack(list(tables))
    changes = (values[:, 1:] != values[:, :-1]).any(dim=0).cpu()
    last = torch.cat([changes, changes.new_ones(1)]).nonzero()[:, 0]
    return torch.stack([torch.cat([last.new_zeros(1), last[:-1] + 1]), last]).to(values.device)


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
            steps, own = scale.index_select(2, columns), codes.index_select(2, columns)
            best = problem.rounded(columns, own, steps, problem.gradients.index_select(3, columns))
            codes.index_copy_(2, columns, best)
            problem.move(columns, (problem.values[:, best] - problem.values[:, own]).mul_(steps))
        if torch.equal(before, codes):
            break
    return codes


class Problem:
    """The sum over all settings of the errors (V - W_b) H (V - W_b)' + rest of a weight (groups, rows, inputs).

    What it knows of each setting is in one tensor for all of them, the fine ones first: those at which no two codes are
    alike. `start` finds `gradients` (settings, groups, rows, inputs), half those of the errors along the codes, the
    `errors` of each row (settings, groups, rows), and how much each weighs, `weights`: by its relative size.
    """

    def __init__(self, weight: Tensor, settings: Sequence[Setting], tolerance: float):
        values = torch.stack([setting.values for setting in settings])
        is_fine = (values[:, 1:] > values[:, :-1]).all(dim=1).tolist()
        order = sorted(range(len(settings)), key=lambda place: not is_fine[place])
        settings, self.values, fine = [settings[place] for place in order], values[order], sum(is_fine)
        coarse = self.values[fine:] if fine < len(settings) else torch.zeros_like(values[:1])
        self.meanings = Meanings(self.values, segments([*coarse]), fine)
        self.second = _damp(torch.stack([setting.second for setting in settings]))  # H
        self.squares = self.second.diagonal(dim1=2, dim2=3).mean(dim=(0, 1))  # (inputs,)
        self.order = self.squares.argsort(descending=True)
        energy = (weight @ self.second).mul_(weight).sum(dim=3)
        self.floor = tolerance * energy + 1e-30
        self.importance = energy.new_tensor([setting.importance for setting in settings])[:, None, None]
        targets = [setting.target for setting in settings]
        self.wanted = weight  # W_b
        if any(target is not None for target in targets):
            self.wanted = torch.stack([weight if t is None else weight + weight @ t.change for t in targets])
        nothing = torch.zeros_like(energy[0])
        rests = [nothing if t is None else (weight @ t.rest).mul_(weight).sum(dim=2).clamp_min_(0) for t in targets]
        self.rest = torch.stack(rests)

    def start(self, codes: Tensor, scale: Tensor) -> None:
        """Find errors and gradients at `codes`, and what each setting weighs from now on."""
        apart = self.values[:, codes].mul_(scale).sub_(self.wanted)
        self.gradients = apart @ self.second
        self.errors = apart.mul_(self.gradients).sum(dim=3) + self.rest
        self.weights = self.importance / (self.errors.clamp_min(0) + self.floor)

    def among(self, columns: Tensor) -> Tensor:
        """What changes of some `columns` add to the gradients of each other: (settings, groups, columns, columns)."""
        return self.second.index_select(2, columns).index_select(3, columns)

    def rounded(self, columns: Tensor, codes: Tensor, steps: Tensor, gradients: Tensor) -> Tensor:
        """The codes (groups, rows, columns) of some `columns`, rounded anew one after the other from `codes` on.

        `steps` are their scales, `gradients` those at `codes`, which are brought up to date in place.
        """
        return round_columns(Columns(codes, steps, gradients, self.among(columns), self.weights), self.meanings)

    def move(self, columns: Tensor, changes: Tensor) -> None:
        """Let the gradients know of `changes` (settings, groups, rows, columns) of what is made of the weight."""
        self.gradients += changes @ self.second.index_select(2, columns)
