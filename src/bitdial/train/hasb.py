"""Hessian-Aware Stochastic Bit-switching: the plans that a step of mixed-precision training runs (Algorithms 1, A.3).

A step still has one pass for each width. The highest and the lowest pass are pure, so that the outermost settings are
trained at every step (the sandwich rule). In the passes between, each layer keeps the pass's width or, with probability
sigma, is drawn anew by a roulette: among all widths alike, or, for a layer whose sensitivity reaches the mean, in
proportion to the bits, so that sensitive layers see more of the high widths. Random sampling (Bit-Mixer's) draws alike
for all layers. Layers with a width of their own stay at it in every pass, and the mean is that of the others.

Plans are a function of (seed, step): every process and every resumed run draws the same.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence

import torch

from bitdial.dial.plan import BitPlan


def roulette(bit_choices: Sequence[int], *, sensitive: bool) -> torch.Tensor:
    """The probability of each width (widths,) in float64: alike, or in proportion to the bits if `sensitive`."""
    weights = torch.tensor(bit_choices if sensitive else [1] * len(bit_choices), dtype=torch.float64)
    return weights / weights.sum()


def sensitive_layers(sensitivity: Mapping[str, float]) -> set[str]:
    """The layers whose sensitivity is not below the mean."""
    mean = math.fsum(sensitivity.values()) / len(sensitivity)
    return {name for name, value in sensitivity.items() if value >= mean}


class PlanSampler:
    """Draws the plans of each step, for layers that all have `bit_choices`.

    `fixed` are layers beside these that have a width of their own, {layer: bits}: no pass gives them another.
    """

    def __init__(
        self,
        layers: Sequence[str],
        bit_choices: tuple[int, ...],
        *,
        sensitive: set[str],
        seed: int,
        fixed: Mapping[str, int] | None = None,
    ):
        self.layers, self.bit_choices, self.seed, self.fixed = tuple(layers), bit_choices, seed, dict(fixed or {})
        self.probabilities = torch.stack([roulette(bit_choices, sensitive=name in sensitive) for name in self.layers])

    def plans(self, step: int, sigma: float) -> dict[int, BitPlan]:
        """The plan of each pass, by the pass's width."""
        digest = hashlib.blake2b(f"{self.seed},{step}".encode(), digest_size=4).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest))
        return {bits: self._plan(bits, sigma, generator) for bits in self.bit_choices}

    def _plan(self, bits: int, sigma: float, generator: torch.Generator) -> BitPlan:
        if bits in (self.bit_choices[0], self.bit_choices[-1]):
            return BitPlan(default=bits)
        redrawn = torch.rand(len(self.layers), generator=generator, dtype=torch.float64) < sigma
        drawn = torch.multinomial(self.probabilities, 1, generator=generator).squeeze(1)
        return BitPlan(
            self.fixed
            | {
                name: self.bit_choices[choice] if anew else bits
                for name, anew, choice in zip(self.layers, redrawn.tolist(), drawn.tolist(), strict=True)
            }
        )


def sigma_at(epoch: int, *, sigma: float, epochs: int, warmup: int) -> float:
    """The share of layers drawn anew in `epoch` (from 0): sigma * (epoch + 1) / epochs, 0 in the first `warmup` epochs.

    The paper's line compounds if it is read to the letter; this is what it means.
    """
    return 0.0 if epoch < warmup else sigma * (epoch + 1) / epochs
