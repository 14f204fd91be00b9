"""How long the search takes, and what greedy and evolutionary searches lose against it, on the same instances.

    python benchmarks/search.py            # a table, and results/search-cpu.json

The network is ResNet50 with all but its last layer quantised: 53 layers, four widths, weights as they are initialised,
costs of one image of 224 x 224. Sensitivities are drawn from a log-normal distribution (sigma 1.5), since the solver
does not care where they come from. Each instance is 60 budgets from the lowest to the highest:

    average_bits        the default of `candidates`
    layer_average_bits  the paper's constraint and objective
    three budgets       average bits, BitOps and activation bytes together, at the same share of their ranges

    ilp         `bitdial.search`: exact
    greedy      from the highest widths down: the step that costs the least loss per share of what is over budget
    evolution   100 generations (--generations) of 64 plans: uniform crossover, mutation, the greedy steps to repair;
                started from random and uniform plans

`excess` is a plan's loss over the least, less one. `alternatives` are the plans of the paper's Algorithm 2 at 5 average
bits, in the first instance.
"""

import argparse
import importlib.metadata
import json
import math
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from timing import command

from bitdial import QuantConfig, Rule, build_model, candidates, measure_costs, prepare
from bitdial.planning.problem import Problem, build_problem, layer_losses
from bitdial.planning.solve import solve

BIT_CHOICES = (8, 6, 4, 2)
INSTANCES: dict[str, tuple[str, tuple[str, ...]]] = {
    "average_bits": ("error", ("average_bits",)),
    "layer_average_bits": ("bits", ("layer_average_bits",)),
    "three budgets": ("error", ("average_bits", "bitops", "activation_bytes")),
}
POPULATION = 64
ROOT = Path(__file__).resolve().parent.parent
Limits = dict[str, Fraction]


@dataclass
class Table:
    """A problem in floats, for the searches that try many plans; choices run from the most bits to the fewest."""

    loss: list[list[float]]
    costs: dict[str, list[list[float]]]
    limits: dict[str, float]

    @classmethod
    def of(cls, problem: Problem, limits: Limits) -> "Table":
        """The problem with the constant part taken off the limits."""
        costs = {q: [[float(v) for v in unit.costs[q]] for unit in problem.units] for q in limits}
        spare = {q: float(limit - problem.constant.get(q, 0)) * (1 + 1e-12) for q, limit in limits.items()}
        return cls([list(unit.loss) for unit in problem.units], costs, spare)

    def excess(self, plan: list[int]) -> dict[str, float]:
        """What is over budget, as shares of the budgets."""
        spent = {q: sum(row[c] for row, c in zip(rows, plan, strict=True)) for q, rows in self.costs.items()}
        return {q: value / self.limits[q] - 1 for q, value in spent.items() if value > self.limits[q]}

    def total(self, plan: list[int]) -> float:
        """The loss of a plan."""
        return math.fsum(row[c] for row, c in zip(self.loss, plan, strict=True))

    def repaired(self, plan: list[int]) -> list[int]:
        """The plan with layers lowered one width at a time, the best step first, until it is within the budgets."""
        plan = list(plan)
        while over := self.excess(plan):
            steps = []
            for u, c in enumerate(plan):
                if c + 1 < len(self.loss[u]):
                    gain = sum((self.costs[q][u][c] - self.costs[q][u][c + 1]) / self.limits[q] for q in over)
                    steps.append(((self.loss[u][c + 1] - self.loss[u][c]) / max(gain, 1e-12), u))
            plan[min(steps)[1]] += 1
        return plan


def greedy(table: Table) -> list[int]:
    """From the highest widths down."""
    return table.repaired([0] * len(table.loss))


def evolution(table: Table, rng: random.Random, generations: int) -> list[int]:
    """The better half of each generation has as many children, by uniform crossover and a mutation or two."""
    width = [len(row) for row in table.loss]
    people = [table.repaired([min(c, n - 1) for n in width]) for c in range(max(width))]
    people += [table.repaired([rng.randrange(n) for n in width]) for _ in range(POPULATION - len(people))]
    for _ in range(generations):
        people = sorted(people, key=table.total)[: POPULATION // 2]
        for _ in range(POPULATION // 2):
            one, other = rng.sample(people[: POPULATION // 2], 2)
            child = [rng.choice(pair) for pair in zip(one, other, strict=True)]
            for _ in range(2):
                place = rng.randrange(len(child))
                child[place] = rng.randrange(width[place])
            people.append(table.repaired(child))
    return min(people, key=table.total)


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """The result and the seconds."""
    begin = time.perf_counter()
    result = work()
    return result, time.perf_counter() - begin


def measure(problem: Problem, limits: list[Limits], seed: int, generations: int) -> list[dict[str, Any]]:
    """A row for each search on one instance."""
    plans, seconds = timed(lambda: [solve(problem, one) for one in limits])
    least = [problem.loss(plan) for plan in plans]
    rows = [row("ilp", least, least, seconds)]
    tables = [Table.of(problem, one) for one in limits]
    searches: dict[str, Callable[[Table], list[int]]] = {
        "greedy": greedy,
        "evolution": lambda table: evolution(table, random.Random(seed), generations),
    }
    for name, work in searches.items():
        found, seconds = timed(lambda work=work: [work(table) for table in tables])
        rows.append(row(name, [problem.loss(plan) for plan in found], least, seconds))
    return rows


def row(name: str, losses: list[float], least: list[float], seconds: float) -> dict[str, Any]:
    """What one search did over all budgets of an instance."""
    excess = [loss / best - 1 if best else float(loss > 0) for loss, best in zip(losses, least, strict=True)]
    return {
        "search": name,
        "budgets": len(losses),
        "seconds": round(seconds, 3),
        "excess_mean": round(statistics.fmean(excess), 6),
        "excess_worst": round(max(excess), 6),
        "optimal": sum(value < 1e-9 for value in excess),
    }


def main() -> None:
    """Measure, print a table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budgets", type=int, default=60)
    parser.add_argument("--generations", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="resnet50", help="any model of build_model on images")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "search-cpu.json")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    image = torch.randn(1, 3, 224, 224)
    first = Rule(pattern="conv1", quantize=True)
    config = QuantConfig(bit_choices=BIT_CHOICES, start="3std", rules=(first,) if options.model == "resnet50" else ())
    model = prepare(build_model(options.model), config, image)
    costs = measure_costs(model, image)
    rng = random.Random(options.seed)
    sensitivity = {name: rng.lognormvariate(0, 1.5) for name in costs.layers}
    rows: list[dict[str, Any]] = []
    for name, (objective, quantities) in INSTANCES.items():
        problem = build_problem(costs, layer_losses(model, objective), sensitivity)
        shares = [Fraction(i, options.budgets - 1) for i in range(options.budgets)]
        limits = [
            {q: problem.least(q) + (problem.most(q) - problem.least(q)) * share for q in quantities} for share in shares
        ]
        rows += [{"instance": name, **one} for one in measure(problem, limits, options.seed, options.generations)]
        for one in rows[-3:]:
            print("{instance:20} {search:10} {seconds:8.2f} s  excess {excess_mean:.4%} mean {excess_worst:.4%} worst  "
                  "optimal {optimal}/{budgets}".format(**one))  # fmt: skip
    middle = {"average_bits": sum(BIT_CHOICES) / len(BIT_CHOICES)}
    found, seconds = timed(
        lambda: candidates(model, sensitivity, costs, {}, alternatives_at=middle, progress=sys.stdout.isatty())
    )
    rows.append({"instance": "alternatives", "search": "ilp", "plans": len(found), "seconds": round(seconds, 3)})
    print(f"alternatives         ilp        {seconds:8.2f} s  {len(found)} plans")
    record = {
        "command": command("search"),
        "seed": options.seed,
        "model": options.model,
        "layers": len(costs.layers),
        "bit_choices": list(BIT_CHOICES),
        "device": f"CPU, 1 thread, {platform.machine()}",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "highspy": importlib.metadata.version("highspy"),
        },
        "rows": rows,
    }
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
