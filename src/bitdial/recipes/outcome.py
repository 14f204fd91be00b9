"""What a recipe is given and what it gives back."""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from bitdial.config import Config, check_choice
from bitdial.errors import BitdialError, ConfigError
from bitdial.files.atomic import check_folder, check_target, replacing
from bitdial.functional import scheme_of
from bitdial.nn import TRANSITIONS
from bitdial.prepare.config import QuantConfig
from bitdial.train import History, TrainConfig
from bitdial.train.config import TAUGHT

TEACHERS = ("resnet56",)
NORM_FORMS = (*TRANSITIONS, "none")
_INPUTS = ("data", "start_from", "model", "weights", "workers")
_NOT_SETTINGS = (*_INPUTS, "out", "name", "results", "history", "command", "progress", "replace")
OF_FOLDERS = ("model", "weights", "workers", "size")  # for recipes that read images from folders


@dataclass(frozen=True, kw_only=True)
class RecipeOptions:
    """What the command line may override; None keeps the recipe's own value.

    What QuantConfig or TrainConfig has under the same name, it goes to. All but the first twelve are settings: they
    decide what comes out, so they are in the names of a run's files.
    """

    out: Path
    name: str | None = None  # of the artifact, without its ending
    data: Path | None = None
    start_from: Path | None = None  # the file that a mixed-precision stage, or a joint one, goes on from
    model: str | None = None  # what `weights` or `start_from` must be of
    weights: Path | None = None  # of a float model
    workers: int | None = None  # processes that read images
    results: Path | None = None  # gets a row
    history: Path | None = None  # becomes the run's history
    command: str | None = None  # what was typed, for the result row
    progress: bool = True
    replace: bool = False  # train again although the artifact is there

    holdout: bool = False
    seed: int = 0
    epochs: int | None = None
    float_epochs: int | None = None  # None: as many as `epochs`; for the teacher of a mixed stage, the recipe's
    batch: int | None = None  # samples in a step of the joint stage
    size: int | None = None  # side of the square that images of folders become, in pixels
    cutout: int = 0  # side of the square that is cut out of each image in the joint stage
    recalibrate: int = 0  # training batches from which norm statistics are estimated anew at the end; 0: they stay
    bit_choices: tuple[int, ...] = QuantConfig.bit_choices
    scheme: str = QuantConfig.scheme
    ties: str = QuantConfig.ties
    per_channel: bool = QuantConfig.per_channel
    start: str = QuantConfig.start
    scale_gradient: str = QuantConfig.scale_gradient
    lr: float | None = None
    weight_decay: float = TrainConfig.weight_decay
    optimizer: str = TrainConfig.optimizer
    update: str = TrainConfig.update
    alrs: str = TrainConfig.alrs
    learn_scales: bool = TrainConfig.learn_scales
    scale_lr: float | None = TrainConfig.scale_lr
    scale_state: str = TrainConfig.scale_state
    sampling: str = TrainConfig.sampling
    sigma: float = TrainConfig.sigma
    sigma_warmup: int = TrainConfig.sigma_warmup
    transitions: str = "full"  # of the norms, as `add_transitions` has them; "none": one set per width
    distill: str = TrainConfig.distill
    teacher: str | None = None  # None: the student's own float model
    teacher_seed: int | None = None  # None: as `seed`; one teacher can serve runs of several seeds
    distill_weight: float = TrainConfig.distill_weight
    temperature: float = TrainConfig.temperature

    def __post_init__(self) -> None:
        if self.teacher is not None:
            check_choice("teacher", self.teacher, TEACHERS)
        check_choice("transitions", self.transitions, NORM_FORMS)
        soft = (self.distill_weight, self.temperature) != (TrainConfig.distill_weight, TrainConfig.temperature)
        drawn = (self.sigma, self.sigma_warmup) != (TrainConfig.sigma, TrainConfig.sigma_warmup)
        own_scale_steps = self.scale_lr is not None or self.scale_state != TrainConfig.scale_state
        conflicts = {
            "--sampling (hasb or random) and --start-from go together": (
                self.start_from is None and self.sampling != "none"
            ),
            "--sigma and --sigma-warmup need --sampling": drawn and self.sampling == "none",
            "--transitions needs --sampling": self.transitions != "full" and self.sampling == "none",
            "--teacher needs --distill teacher or cascade": self.teacher is not None and not self.taught,
            "--teacher-seed needs --teacher": self.teacher_seed is not None and self.teacher is None,
            "--distill-weight and --temperature need a --distill other than none": soft and self.distill == "none",
            "--distill in_place needs a lower width to teach: give --bits two or more": (
                self.distill == "in_place" and len(self.bit_choices) == 1
            ),
            "--freeze-scales leaves --scale-lr and --scale-state nothing to do: leave them out": (
                not self.learn_scales and own_scale_steps
            ),
            f"--ties is about double_rounding's second rounding, and {self.scheme} has none: leave it out": (
                self.ties != QuantConfig.ties and not scheme_of(self.scheme).has_ties
            ),
        }
        for problem, found in conflicts.items():
            if found:
                raise ConfigError(problem)
        self._check_places()

    @property
    def taught(self) -> bool:
        """Whether a float model teaches."""
        return self.distill in TAUGHT

    def refuse(self, names: tuple[str, ...], recipe: str) -> None:
        """Raise ConfigError if one of the options `names` was given, which `recipe` would ignore."""
        for name in names:
            if getattr(self, name) not in (None, getattr(type(self), name)):
                raise ConfigError(f"the recipe {recipe} takes no --{name.replace('_', '-')}; leave it out")

    def _check_places(self) -> None:
        """What the run writes at its end must have a place: nothing is worse than a training that is lost."""
        check_folder("--out", self.out)
        for name, path in (("--results", self.results), ("--history", self.history)):
            if path is not None:
                check_target(name, path)
        if self.results is not None:
            check_results(self.results)

    def settings(self, **own: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """All settings, and those of them that are not the default.

        `own` are the recipe's values of settings that are None unless they are given.
        """
        defaults = {f.name: f.default for f in fields(self) if f.name not in _NOT_SETTINGS} | own
        given = {name: getattr(self, name) for name in defaults}
        settings = {name: defaults[name] if value is None else value for name, value in given.items()}
        return settings, {name: value for name, value in settings.items() if value != defaults[name]}


def settings_of(kind: type[Config], settings: dict[str, Any]) -> dict[str, Any]:
    """Those of `settings` that the config class `kind` has too."""
    return {f.name: settings[f.name] for f in fields(kind) if f.name in settings}  # type: ignore[arg-type]


def run_name(first: str, changed: dict[str, Any]) -> str:
    """The name of a run's files: runs that differ in a setting never share one."""
    texts = {name: "".join(map(str, v)) if isinstance(v, tuple) else str(v) for name, v in changed.items()}
    return "-".join([first, *(f"{name}={text}" for name, text in texts.items())])


@dataclass(frozen=True, kw_only=True)
class RecipeOutcome:
    """A finished run: the trained model, its float origin, where its artifact is, and how it did."""

    model: nn.Module
    float_model: nn.Module | None  # None if the run went on from a file
    artifact: Path
    history: History
    metrics: dict[str, Any]  # of the artifact
    float_top1: float | None  # None if there was no float model to measure
    top1: dict[int, float]
    test: Iterable[tuple[Tensor, Tensor]]


def add_result(path: Path, *rows_to_add: dict[str, Any]) -> None:
    """Append to the JSON list at `path`, atomically; several processes may do so at once."""
    with _alone_in(path.parent):
        rows = _read_rows(path)
        with replacing(path, error=BitdialError) as temporary:
            temporary.write_text(json.dumps([*rows, *rows_to_add], indent=1) + "\n")


def check_results(path: Path) -> None:
    """Raise ConfigError unless rows can be added at `path`."""
    _read_rows(path)


def _read_rows(path: Path) -> list[Any]:
    try:
        rows = json.loads(path.read_text()) if path.exists() else []
    except (OSError, ValueError) as problem:
        raise ConfigError(f"{path} is not a list of results: {problem}") from problem
    if not isinstance(rows, list):
        raise ConfigError(f"{path} is not a list of results")
    return rows


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Make the other processes that come to `folder` this way wait, where the system has such locks."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    except OSError as problem:
        raise BitdialError(f"cannot write in {folder}: {problem}") from problem
    try:
        with suppress(OSError):  # not every file system locks folders
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)  # gives the lock back


def write_history(path: Path, history: History, row: dict[str, Any]) -> None:
    """Write `history` and, as its "settings", the result row to the JSON file at `path`, atomically.

    It is for figures: numbers are rounded to four digits, and of the gradient samples one an epoch is kept.
    """
    course = history.to_dict()
    thinned = {
        bits: samples[:: max(len(samples) // len(history.rows), 1)] for bits, samples in course["gradients"].items()
    }
    with replacing(path, error=BitdialError) as temporary:
        temporary.write_text(json.dumps({"settings": row, **_rounded({**course, "gradients": thinned})}) + "\n")


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_rounded(inner) for inner in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value
