"""What the recipe for detectors is given."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from bitdial.config import check_choice
from bitdial.errors import ConfigError
from bitdial.files.atomic import check_folder, check_target
from bitdial.recipes.outcome import check_results

METHODS = ("trained", "calibrated")
_NOT_SETTINGS = ("out", "data", "name", "results", "command", "progress", "replace", "workers", "weights")
_NOT_DECIDING = ("evaluate_every", "checkpoint_every", "pictures")


@dataclass(frozen=True, kw_only=True)
class DetectorOptions:
    """What the command line says. All from `seed` on are settings: they decide what comes out.

    The float detector is trained first, for `float_epochs`; it is kept in `out` for other runs of the same start.
    Then all widths are trained jointly for `epochs`, or with method='calibrated' they are calibrated on `calibration`
    images, without labels.
    """

    out: Path
    data: Path  # a folder of images and instance maps
    weights: Path | None = None  # of the classifier that one of torchvision's detectors is built on
    name: str | None = None  # of the artifact, without its ending
    results: Path | None = None  # gets a row for each width
    command: str | None = None
    progress: bool = True
    replace: bool = False  # train again although the artifact is there
    workers: int = 4  # threads that read images

    seed: int = 0
    model: str = "torchvision:maskrcnn_resnet50_fpn"
    method: str = "trained"
    bit_choices: tuple[int, ...] = (8, 6, 4, 2)
    scheme: str = "double_rounding"
    start: str = "mse"
    float_epochs: int = 24
    float_lr: float = 1e-4
    epochs: int = 12
    lr: float = 5e-5
    weight_decay: float = 1e-4
    clip_norm: float = 10.0
    batch: int = 8
    size: int = 640  # to which the shorter side of an image is scaled (torchvision's detectors)
    crop: int = 768  # the largest side of a part to train on
    count: int | None = None  # images of each split, evenly spread; None: all
    calibration: int = 64  # images to start scales from, or to calibrate on
    max_detections: int = 400
    evaluate_every: int = 4  # epochs
    checkpoint_every: int | None = 50  # steps
    pictures: int = 3  # images of the page

    def __post_init__(self) -> None:
        check_choice("method", self.method, METHODS)
        least = dict.fromkeys(("float_epochs", "epochs", "batch", "size", "crop", "calibration", "max_detections"), 1)
        for name, smallest in {**least, "evaluate_every": 1, "pictures": 0, "workers": 1}.items():
            if getattr(self, name) < smallest:
                option = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{option} {getattr(self, name)}: a whole number of at least {smallest} is wanted")
        for name in ("float_lr", "lr", "clip_norm"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"--{name.replace('_', '-')} {getattr(self, name)}: a number above 0 is wanted")
        if not self.data.is_dir():
            raise ConfigError(f"there is no folder {self.data}; --data is a folder of images and instance maps")
        check_folder("--out", self.out)
        if self.results is not None:
            check_target("--results", self.results)
            check_results(self.results)

    def settings(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """All settings, and those of them that are not the default, by which a run is named."""
        defaults = {f.name: f.default for f in fields(self) if f.name not in (*_NOT_SETTINGS, *_NOT_DECIDING)}
        settings = {name: getattr(self, name) for name in defaults}
        return settings, {name: value for name, value in settings.items() if value != defaults[name]}

    def float_settings(self) -> dict[str, Any]:
        """Those settings that decide what the float detector is."""
        names = ("seed", "model", "float_epochs", "float_lr", "weight_decay", "batch", "size", "crop", "count")
        return {name: getattr(self, name) for name in (*names, "max_detections")}
