"""To compare plans fairly: random ones of the same cost, and a paired test on the same samples."""

import math
import random
from collections.abc import Sequence

from bitdial import BitPlan
from bitdial.planning.cost import Costs


def mcnemar(one: Sequence[bool], other: Sequence[bool]) -> float:
    """The two-sided p-value of McNemar's exact test: are `one` and `other`, right or wrong sample by sample, alike?

    Only samples on which the two differ count. Were both equally good, each of these would be a toss of a coin.
    """
    gained = sum(a and not b for a, b in zip(one, other, strict=True))
    lost = sum(b and not a for a, b in zip(one, other, strict=True))
    tosses = gained + lost
    tail = sum(math.comb(tosses, k) for k in range(min(gained, lost) + 1))
    return min(1.0, 2 * tail / 2**tosses) if tosses else 1.0


def random_plan(costs: Costs, quantity: str, most: float, *, seed: int, activation_bits: int | None = None) -> BitPlan:
    """A plan of random weight bits that costs at most `most`, and so much that no layer can have one step more.

    Every layer draws its width; then random layers go down one step until it fits, and up one while it does.
    """
    rng = random.Random(seed)
    free = [name for name, layer in costs.layers.items() if layer.tied_to is None]
    place = {name: rng.randrange(len(costs.bit_choices[name])) for name in free}

    def plan() -> BitPlan:
        bits = {name: costs.bit_choices[name][place[layer.tied_to or name]] for name, layer in costs.layers.items()}
        return BitPlan({name: (b, activation_bits or b) for name, b in bits.items()})

    def fits() -> bool:
        return costs.of(plan())[quantity] <= most

    while not fits():
        lower = [name for name in free if place[name] + 1 < len(costs.bit_choices[name])]
        if not lower:
            raise ValueError(f"no plan has {quantity} of at most {most}")
        place[rng.choice(lower)] += 1
    open_ = [name for name in free if place[name]]
    while open_:
        name = rng.choice(open_)
        place[name] -= 1
        if not fits():
            place[name] += 1
            open_.remove(name)  # costs only grow, so it will not fit later
        elif not place[name]:
            open_.remove(name)
    return plan()
