"""What a recipe is given and what it gives back."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from bitdial.container import replacing
from bitdial.errors import BitdialError, ConfigError
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
    distill: str = "none"
    start: str = "mse"
    lr: float | None = None
    data: Path | None = None
    holdout: bool = False
    results: Path | None = None
    command: str | None = None  # what was typed, for the result row
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


def add_result(path: Path, row: dict[str, Any]) -> None:
    """Append `row` to the JSON list at `path`, atomically."""
    try:
        rows = json.loads(path.read_text()) if path.exists() else []
    except (OSError, ValueError) as problem:
        raise ConfigError(f"{path} is not a list of results: {problem}") from problem
    if not isinstance(rows, list):
        raise ConfigError(f"{path} is not a list of results")
    with replacing(path, error=BitdialError) as temporary:
        temporary.write_text(json.dumps([*rows, row], indent=1) + "\n")
