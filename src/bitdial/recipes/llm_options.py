"""What the recipe for language models is given."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from bitdial.errors import ConfigError
from bitdial.files.atomic import check_folder, check_target
from bitdial.recipes.outcome import check_results

OF_THE_FILE = (
    "bit_choices",
    "scheme",
    "group_size",
    "activations",
    "start",
    "rotate",
)  # not for a run that starts from one
_NOT_SETTINGS = ("out", "model", "text", "calibrated", "name", "results", "command", "progress", "replace")
_NOT_DECIDING = ("evaluations", "checkpoint_every", "checkpointing", "record", "shard", "tokens")


@dataclass(frozen=True, kw_only=True)
class LlmOptions:
    """What the command line says. All from `seed` on are settings: they decide what comes out.

    `steps` or `tokens` say how long to train; the steps are rounded up to whole intervals, of which there are
    `evaluations`. `batch` rows of `length` tokens make a step, over all processes; each process takes its share in
    `accumulate` parts. `group_size=0` is a scale for each row of a weight.
    """

    out: Path
    model: Path  # a transformers folder, with its tokenizer
    text: tuple[Path, ...]
    calibrated: Path | None = None  # an artifact of the same model to start from
    name: str | None = None  # of the artifact, without its ending
    results: Path | None = None  # gets a row for each width
    command: str | None = None
    progress: bool = True
    replace: bool = False  # train again although the artifact is there

    seed: int = 0
    bit_choices: tuple[int, ...] = (8, 4, 3, 2)
    scheme: str = "double_rounding"
    group_size: int = 32
    activations: str = "float"
    start: str = "balanced"
    rotate: str | None = None  # how: 'online' or 'merged'
    length: int = 512
    batch: int = 16
    accumulate: int = 1
    steps: int = 1000
    tokens: int | None = None  # in place of steps
    lr: float = 2e-5
    scale_lr: float | None = None
    update: str = "separate"
    lower_weight: float = 1.5
    clip_norm: float = 1.0
    distill_weight: float = 1.0
    train_embeddings: bool = False  # and the head; else they stay as they are
    generate: int = 0  # rows that the teacher writes
    held_out: int = 32768  # tokens at the end of the text, but at most a tenth of it
    evaluations: int = 10
    checkpoint_every: int | None = None
    checkpointing: bool = False  # of activations
    record: bool = False  # on a GPU, a step as one CUDA graph
    shard: bool = False  # each process holds a part of the model

    def __post_init__(self) -> None:
        least = {"length": 2, "batch": 1, "steps": 1, "held_out": 2, "evaluations": 1, "group_size": 0, "generate": 0}
        for name, smallest in least.items():
            if getattr(self, name) < smallest:
                option = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{option} {getattr(self, name)}: a whole number of at least {smallest} is wanted")
        if self.tokens is not None and self.steps != LlmOptions.steps:
            raise ConfigError("--steps and --tokens say the same in two ways; give one of them")
        given = [name for name in OF_THE_FILE if getattr(self, name) != getattr(LlmOptions, name)]
        if self.calibrated is not None and given:
            flags = ", ".join("--bits" if name == "bit_choices" else f"--{name.replace('_', '-')}" for name in given)
            raise ConfigError(f"{flags}: a run that starts from {self.calibrated} takes it from there; leave it out")
        for name in ("checkpointing", "shard"):
            if self.record and getattr(self, name):
                raise ConfigError(f"--record and --{name} do not go together: such steps cannot be recorded")
        if not self.model.is_dir():
            raise ConfigError(f"there is no folder {self.model}; --model is a folder of a transformers model")
        check_folder("--out", self.out)
        if self.results is not None:
            check_target("--results", self.results)
            check_results(self.results)

    @property
    def intervals(self) -> tuple[int, int]:
        """How many intervals there are, and the steps of each."""
        asked = self.steps if self.tokens is None else -(-self.tokens // (self.batch * self.length))
        steps = -(-asked // self.evaluations)
        return -(-asked // steps), steps

    def settings(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """All settings, and those of them that are not the default, by which a run is named."""
        intervals, steps = self.intervals
        defaults = {f.name: f.default for f in fields(self) if f.name not in _NOT_SETTINGS}
        settings = {name: getattr(self, name) for name in defaults if name not in _NOT_DECIDING}
        settings |= {"group_size": self.group_size or None, "steps": intervals * steps}
        settings |= {"alrs": "off" if self.update == "accumulated" else "relative"}
        return settings, {n: v for n, v in settings.items() if n in defaults and v != defaults[n]}
