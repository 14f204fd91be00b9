"""One run of a recipe: the files that are its own, and what the file it leaves says of it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from bitdial.artifact import Artifact, read_artifact
from bitdial.errors import ArtifactError, ConfigError
from bitdial.files.atomic import check_target
from bitdial.files.lock import sole_writer
from bitdial.prepare.config import QuantConfig
from bitdial.recipes.outcome import settings_of
from bitdial.train import TrainConfig, distributed
from bitdial.train.checkpoint import differences


class FinishedRun(ConfigError):
    """The run that was asked for is finished: `artifact` is what it left."""

    def __init__(self, path: Path, artifact: Artifact):
        super().__init__(f"{path} is there already: this run is finished; train it again with --replace")
        self.path, self.artifact = path, artifact


class RunOptions(Protocol):
    """What a run must know of its options."""

    @property
    def command(self) -> str | None: ...

    @property
    def replace(self) -> bool: ...


Options = TypeVar("Options", bound=RunOptions)


@dataclass(frozen=True, kw_only=True)
class RecipeRun(Generic[Options]):
    """A run by its settings, those of them that are `changed`, and its files."""

    recipe: str
    name: str
    options: Options
    settings: dict[str, Any]
    changed: dict[str, Any]
    artifact: Path
    checkpoint: Path

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep the run's file to this process; ConfigError if another one is at it, or if what is there would be lost.

        A file of the same run goes if there is a checkpoint to go on from, any file with `options.replace`. Of
        processes that train together, the first has the file to itself.
        """
        for config in (QuantConfig, TrainConfig):
            config(**settings_of(config, self.settings))  # what they refuse is refused before anything is written
        check_target("--out", self.artifact)
        work = self.options.command or f"the recipe {self.recipe}"
        with sole_writer(self.artifact, work=work) if distributed.rank() == 0 else nullcontext():
            if self.artifact.exists() and not self.options.replace:
                self._check_finished()
            yield

    def _check_finished(self) -> None:
        advice = "choose another --out, or replace it with --replace"
        try:
            there = read_artifact(self.artifact)
        except ArtifactError as problem:
            raise ConfigError(f"{self.artifact} is there already and cannot be read: {problem}; {advice}") from problem
        made_by = there.metrics.get("run")
        if not isinstance(made_by, dict) or not isinstance(settings := made_by.get("settings"), dict):
            raise ConfigError(f"{self.artifact} is there already, and does not say which run made it; {advice}")
        now = self.record()
        if made_by.get("recipe") != now["recipe"]:
            raise ConfigError(f"{self.artifact} is there already, of the recipe {made_by.get('recipe')}; {advice}")
        if changed := differences(settings, now["settings"]):
            raise ConfigError(f"{self.artifact} is there already, of another run ({changed}); {advice}")
        if not self.checkpoint.exists():
            raise FinishedRun(self.artifact, there)

    def record(self) -> dict[str, Any]:
        """What the file says of the run, as JSON values; a run with equal settings has an equal record."""
        record = {"recipe": self.recipe, "name": self.name, "settings": self.settings}
        return dict(json.loads(json.dumps(record)))

    def metrics(
        self, *, float_top1: float | None, top1: dict[int, float], data: str, test: list[tuple[Tensor, Tensor]]
    ) -> dict[str, Any]:
        """The metrics of the file: accuracies, the images that they are from, and the run."""
        part = "held out of the training set" if self.settings["holdout"] else "the test set"
        return {
            "recipe": self.recipe.removesuffix("-mixed"),
            "holdout": self.settings["holdout"],
            "float_top1": float_top1,
            "top1": {str(b): v for b, v in top1.items()},
            "images": {"data": data, "part": part, "count": sum(len(y) for _, y in test)},
            "run": self.record(),
        }


def describe_images(stored: object) -> str:
    """The images that a file's accuracies are from: '500 images of digits, the test set'; or 'not recorded'."""
    match stored:
        case {"count": int(count), "data": str(data), "part": str(part)}:
            return f"{count:,} images of {data}, {part}"
        case _:
            return "not recorded"
