"""What a recipe is given and what it gives back."""

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from bitdial.train import History


@dataclass(frozen=True, kw_only=True)
class RecipeOptions:
    """The few things that the command line may override; None keeps the recipe's own value."""

    out: Path
    name: str | None = None  # of the artifact, without its ending
    epochs: int | None = None
    seed: int = 0
    scheme: str = "double_rounding"
    bit_choices: tuple[int, ...] = (8, 6, 4, 2)
    alrs: str = "relative"
    progress: bool = True


@dataclass(frozen=True, kw_only=True)
class RecipeOutcome:
    """A finished run: the trained model, its float origin, where its artifact is, and how it did."""

    model: nn.Module
    float_model: nn.Module
    artifact: Path
    history: History
    float_top1: float
    top1: dict[int, float]
    test: list[tuple[Tensor, Tensor]]
