"""The integer program, solved by HiGHS. The only file that imports highspy.

    minimise    sum_u loss[u][c_u]        over one choice c_u of each unit
    subject to  sum_u cost[u][c_u] <= budget, for each bounded quantity

HiGHS computes in floats with tolerances. What it says is checked in exact arithmetic: a plan beyond a budget is cut off
and the program solved again. Losses span many orders of magnitude, so the program is solved again without the choices
that lose more alone than the best plan found does in all, until the scale of the objective is that of its optimum.
Plans whose loss lies within one part in 10^9 of the least tie, and a second program picks among them the one with the
least `plain` loss, which does not depend on the sensitivities.

Why raising one sensitivity s_k to s_k' never lowers the bits of layer k (given the same everything else): let p and p'
be the plans found before and after, E_k the error of layer k. Each is optimal for its own sensitivities:

    s_k  E_k(p)  + rest(p)  <= s_k  E_k(p') + rest(p')
    s_k' E_k(p') + rest(p') <= s_k' E_k(p)  + rest(p)

Added up, (s_k' - s_k) (E_k(p') - E_k(p)) <= 0: the error of k does not grow. E_k falls with the bits (`monotone`), so
the bits of k do not fall, unless its errors are equal. Then both lines are equalities, p and p' are optimal before and
after, and the second program, which is the same, picks the same plan. (`_dominates` reduces widths that err equally to
the cheapest, so their ties do not come up; and ties are ties up to one part in 10^9.)
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from bitdial.errors import BudgetError, MissingDependencyError
from bitdial.planning.cost import plain_number
from bitdial.planning.problem import Problem, Unit

TIE = 1e-9  # plans whose loss differs by this share tie
SCALE = 1e3  # what objective and rows are scaled to: far above HiGHS's tolerances, which are absolute
SETTINGS: dict[str, Any] = {
    "output_flag": False,
    "threads": 1,
    "random_seed": 0,
    "mip_rel_gap": 0.0,
    "mip_abs_gap": 0.0,
    "mip_feasibility_tolerance": 1e-9,
    "primal_feasibility_tolerance": 1e-9,
    "dual_feasibility_tolerance": 1e-9,
    "small_matrix_value": 1e-12,
}

Options = list[list[int]]  # for each unit, the choices (by index) that are still open
Values = list[list[float]]  # for each unit and each choice, a number


@dataclass(frozen=True)
class _Row:
    """sum of values <= limit."""

    values: Values
    limit: float


def solve(problem: Problem, budgets: Mapping[str, Fraction]) -> list[int]:
    """One choice (by index) of each unit, of the least loss within `budgets`; BudgetError if there is none."""
    chosen = best_choices(problem, budgets)
    if chosen is None:
        raise _infeasible(problem, budgets)
    return chosen


def best_choices(problem: Problem, budgets: Mapping[str, Fraction]) -> list[int] | None:
    """As `solve`, but None if no plan is within `budgets`."""
    options = _open_choices(problem, budgets)
    if options is None:
        return None
    rows = _rows(problem, budgets)

    def fits(chosen: list[int]) -> bool:
        return all(problem.cost(name, chosen) <= limit for name, limit in budgets.items())

    loss = [list(unit.loss) for unit in problem.units]
    best = _minimise(loss, options, rows, fits)
    if best is None:
        return None
    floor = [min(values[c] for c in open_) for values, open_ in zip(loss, options, strict=True)]
    extra = [[value - least for value in values] for values, least in zip(loss, floor, strict=True)]
    most = sum(values[c] for values, c in zip(extra, best, strict=True)) * (1 + TIE)
    tied = [[c for c in open_ if values[c] <= most] for values, open_ in zip(extra, options, strict=True)]
    if all(len(open_) == 1 for open_ in tied):
        return best
    if most > 0:
        rows = [*rows, _Row([[SCALE * value / most for value in values] for values in extra], SCALE)]
    return _minimise([list(unit.plain) for unit in problem.units], tied, rows, fits) or best


def _open_choices(problem: Problem, budgets: Mapping[str, Fraction]) -> Options | None:
    """Each unit's choices that fit the budgets, at least with all others at their cheapest, and are not dominated."""
    slack = {name: limit - problem.least(name) for name, limit in budgets.items()}
    if any(value < 0 for value in slack.values()):
        return None
    options = []
    for unit in problem.units:
        spare = {name: slack[name] + min(unit.costs[name]) for name in budgets}
        fitting = [c for c in range(len(unit.choices)) if all(unit.costs[name][c] <= spare[name] for name in budgets)]
        open_ = [c for c in fitting if not any(_dominates(unit, d, c, budgets) for d in fitting)]
        if not open_:
            return None
        options.append(open_)
    return options


def _dominates(unit: Unit, one: int, other: int, budgets: Mapping[str, Fraction]) -> bool:
    """Whether `one` is in nothing worse than `other`; of two that are alike, the one with fewer bits wins."""
    tables: list[tuple[Any, ...]] = [unit.loss, unit.plain, *(unit.costs[name] for name in budgets)]
    mine, its = [table[one] for table in tables], [table[other] for table in tables]
    if mine == its:
        return unit.choices[one] < unit.choices[other]
    return all(a <= b for a, b in zip(mine, its, strict=True))


def _rows(problem: Problem, budgets: Mapping[str, Fraction]) -> list[_Row]:
    """The budgets as rows: what each choice costs above its unit's cheapest, as a share of what is to spare."""
    rows = []
    for name, limit in budgets.items():
        slack = limit - problem.least(name)
        if slack > 0:  # else only the cheapest choices are open
            values = [
                [SCALE * float((cost - min(unit.costs[name])) / slack) for cost in unit.costs[name]]
                for unit in problem.units
            ]
            rows.append(_Row(values, SCALE))
    return rows


def _minimise(
    values: Values, options: Options, rows: list[_Row], fits: Callable[[list[int]], bool]
) -> list[int] | None:
    """The open choices of the least sum of values; solves again at a finer scale while the optimum is far below it."""
    floor = [min(row[c] for c in open_) for row, open_ in zip(values, options, strict=True)]
    extra = [[value - least for value in row] for row, least in zip(values, floor, strict=True)]
    best = None
    while True:
        largest = max(row[c] for row, open_ in zip(extra, options, strict=True) for c in open_)
        scaled = [[SCALE * value / largest for value in row] for row in extra] if largest > 0 else extra
        found = _run(scaled, options, rows, fits)
        if found is None:
            return best
        best = found
        total = sum(row[c] for row, c in zip(extra, best, strict=True))
        if total > largest / 100 or largest == 0:
            return best
        options = [[c for c in open_ if row[c] <= total] for row, open_ in zip(extra, options, strict=True)]


def _run(objective: Values, options: Options, rows: list[_Row], fits: Callable[[list[int]], bool]) -> list[int] | None:
    """Solve one program; plans that pass HiGHS's tolerances but not `fits` are cut off one by one."""
    highspy = require_highspy()
    columns = [(u, c) for u, open_ in enumerate(options) for c in open_]
    one_each = [[i for i, (u, _) in enumerate(columns) if u == unit] for unit in range(len(options))]
    solver = highspy.Highs()
    for name, value in SETTINGS.items():
        status = solver.setOptionValue(name, value)
        assert status == highspy.HighsStatus.kOk, f"HiGHS does not take {name}={value}"
    count = len(columns)
    solver.addVars(count, np.zeros(count), np.ones(count))
    indices = np.arange(count, dtype=np.int32)
    solver.changeColsCost(count, indices, np.array([objective[u][c] for u, c in columns], dtype=np.float64))
    solver.changeColsIntegrality(count, indices, np.full(count, highspy.HighsVarType.kInteger))
    for members in one_each:
        solver.addRow(1.0, 1.0, len(members), np.array(members, dtype=np.int32), np.ones(len(members)))
    for row in rows:
        entries = [(i, row.values[u][c]) for i, (u, c) in enumerate(columns) if row.values[u][c]]
        where = np.array([i for i, _ in entries], dtype=np.int32)
        solver.addRow(-highspy.kHighsInf, row.limit, len(entries), where, np.array([v for _, v in entries]))
    while True:
        solver.run()
        status = solver.getModelStatus()
        if status == highspy.HighsModelStatus.kInfeasible:
            return None
        assert status == highspy.HighsModelStatus.kOptimal, f"HiGHS stopped with {status}"
        solution = np.asarray(solver.getSolution().col_value)
        picked = [members[int(solution[members].argmax())] for members in one_each]
        chosen = [columns[i][1] for i in picked]
        if fits(chosen):
            return chosen
        solver.addRow(
            -highspy.kHighsInf, len(picked) - 1.0, len(picked), np.array(picked, dtype=np.int32), np.ones(len(picked))
        )


def require_highspy() -> Any:
    """The solver's package; an error that names the extra if it is missing."""
    try:
        import highspy
    except ImportError as problem:
        raise MissingDependencyError.missing("search", "highspy") from problem
    return highspy


def _infeasible(problem: Problem, budgets: Mapping[str, Fraction]) -> BudgetError:
    """The error for budgets that no plan meets, with the nearest value of each that is to blame."""
    alone = {name: problem.least(name) for name, limit in budgets.items() if problem.least(name) > limit}
    nearest = {name: _at_least(value) for name, value in (alone or _nearest_together(problem, budgets)).items()}
    parts = [f"{name} <= {plain_number(budgets[name])!r} (the least is {value!r})" for name, value in nearest.items()]
    if alone:
        way_out = "raise that budget or release pinned layers (by `pinned` also those with a width of their own)"
        return BudgetError(f"no plan meets {' or '.join(parts)}; {way_out}", nearest)
    if not parts:
        asked = ", ".join(f"{name} <= {plain_number(limit)!r}" for name, limit in budgets.items())
        return BudgetError(f"no plan meets {asked} together, nor all but one of them; raise several", {})
    return BudgetError(
        f"each budget can be met, but not all together; with the others as they are: {', or '.join(parts)}", nearest
    )


def _nearest_together(problem: Problem, budgets: Mapping[str, Fraction]) -> dict[str, Fraction]:
    """For each budget, the least value of its quantity that the other budgets allow; not those that allow none."""
    found = {}
    for name in budgets:
        units = tuple(
            Unit(
                layers=u.layers,
                choices=u.choices,
                loss=tuple(float(cost - min(u.costs[name])) for cost in u.costs[name]),
                plain=u.plain,
                costs=u.costs,
            )
            for u in problem.units
        )
        rest = {other: limit for other, limit in budgets.items() if other != name}
        chosen = best_choices(Problem(units=units, constant=problem.constant), rest)
        if chosen is not None:
            found[name] = problem.cost(name, chosen)
    return found


def _at_least(value: Fraction) -> float:
    """The number to ask for so that `value` is within it, as a budget reads it."""
    number = plain_number(value)
    return number if Fraction(repr(number)) >= value else float(np.nextafter(number, np.inf))
