"""A pretrained model and a folder of images in; a file that is good at every width, and its numbers, out. No labels.

Two stages: prepare, calibrate and save; then measure, and add the numbers to the file. A run that is killed in the
first goes on from its checkpoint; one that is killed in the second has its file, which says so, and measures again.
"""

import hashlib
import json
import logging
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bitdial._version import __version__
from bitdial.artifact import amend, read_artifact, save, sizes
from bitdial.calibrate import CalibrateConfig, calibrate
from bitdial.dial.dial import at_bits, set_bits
from bitdial.errors import ArtifactError, ConfigError
from bitdial.files.atomic import check_target, write_json
from bitdial.images import ImageBatches, ImageViews
from bitdial.live.load import load
from bitdial.planning.progress import tracked
from bitdial.prepare.config import QuantConfig
from bitdial.prepare.prepare import prepare
from bitdial.recipes.classes import Judged, judge, predict

log = logging.getLogger(__name__)

ENDING = ".safetensors"
FEW = 100  # images, below which a word is due
TO_PREPARE = 64  # images by which starting scales are chosen
HELD_OUT = 1_000  # images to measure agreement on, where the folder has more than are calibrated on


@dataclass(frozen=True, kw_only=True)
class CalibrationRun:
    """One run: a float model in eval mode, its images, and what is to come out.

    `evaluation` are the images to measure on; None takes others of the same folder, or if it has none, `images`. The
    last step of the calibration sees each image in so many `views`.
    """

    name: str
    model: nn.Module
    images: ImageBatches
    evaluation: ImageBatches | None
    quant: QuantConfig
    config: CalibrateConfig
    out: Path
    views: int = 1
    replace: bool = False
    progress: bool = True

    @property
    def numbers(self) -> Path:
        """The JSON file beside the artifact."""
        return self.out.with_suffix(".json")

    @property
    def page(self) -> Path:
        """The HTML page beside the artifact."""
        return self.out.with_suffix(".html")

    @property
    def checkpoint(self) -> Path:
        """Where the run saves its state; another model, other images or settings have another name."""
        return self.out.with_name(f"{self.out.stem}-{self.digest[:8]}.ckpt")

    @property
    def float_bytes(self) -> int:
        """What the weights of the float model take."""
        return sum(tensor.nbytes for tensor in self.model.state_dict().values())

    @cached_property
    def digest(self) -> str:
        """What tells this calibration from others: model, weights, images and settings."""
        files = [(name, (self.images.folder / name).stat().st_size) for name in self.images.names]
        settings = [one.to_dict() for one in (self.quant, self.config, self.images.settings)]
        facts = [self.name, *settings, files, self.views]
        total = hashlib.sha256(json.dumps(facts, default=str).encode())
        for name, tensor in self.model.state_dict().items():
            total.update(name.encode())
            total.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return total.hexdigest()


def check_out(out: Path) -> None:
    """Raise ConfigError unless a run may write at `out`: looked at before any work."""
    if out.suffix != ENDING:
        raise ConfigError(f"--out {out}: name a file that ends in {ENDING}; its numbers and its page go beside it")
    if not out.parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {out.parent}; make it, or choose another place")
    check_target("--out", out)


def run_calibration(run: CalibrationRun, *, tell: Callable[[str], None] = log.info) -> dict[str, Any]:
    """Calibrate, save at `run.out` with the numbers beside it, and return these; `tell` gets a line for each stage."""
    images, which = _to_evaluate(run)  # before the work: its labels may be incomplete
    if not _is_calibrated(run):
        _calibrate(run, tell)
    tell(f"Measuring on {images.size:,} images: {which}")
    began = time.monotonic()
    whole, judged = _measure(run, images)
    stored = read_artifact(run.out).metrics["calibration"]
    result = {
        "model": run.name,
        "artifact": run.out.name,
        "bitdial": __version__,
        "device": str(run.images.device),
        "images": {"folder": run.images.folder.resolve().name, "count": run.images.size},
        "image_settings": run.images.settings.to_dict(),
        "evaluation": {
            "folder": images.folder.resolve().name,
            "count": images.size,
            "labels": images.labels is not None,
            "which": which,
            "seen": _seen(run, images),
        },
        "views": run.views,
        "quant": json.loads(json.dumps(run.quant.to_dict())),
        "float": {"top1": whole.top1},
        "widths": {str(b): {"top1": one.top1, "agreement": one.agreement} for b, one in judged.items()},
        "calibration": stored,
        "seconds": {"calibrate": stored["seconds"], "measure": time.monotonic() - began},
    }
    amend(run.out, metrics=_measured(result))
    size = sizes(read_artifact(run.out))
    result["bytes"] = {
        "float": run.float_bytes,
        "artifact": size["file"],
        "separate": {str(bits): count for bits, count in size["separate"].items()},
    }
    write_json(run.numbers, result)
    return result


def _is_calibrated(run: CalibrationRun) -> bool:
    """Whether `run.out` is what this run left when it was stopped; ConfigError if something would be lost."""
    there = [path for path in (run.out, run.numbers, run.page) if path.exists()]
    if run.out.exists():
        try:
            metrics: Mapping[str, Any] = read_artifact(run.out).metrics
        except ArtifactError:
            metrics = {}
        own = isinstance(made := metrics.get("run"), dict) and made.get("digest") == run.digest
        if own and "calibration" in metrics and ("agreement" not in metrics or len(there) < 3):
            return True
    if there and not run.replace:
        raise ConfigError(f"{there[0]} is there already; choose another --out, or replace it with --replace")
    return False


def _calibrate(run: CalibrationRun, tell: Callable[[str], None]) -> None:
    """The first stage: from the float model to a file without measurements."""
    _check_room(run)
    _read(run)
    tell(f"Preparing {run.name} on {run.images.size:,} images of {run.images.folder}")
    prepared = prepare(run.model, run.quant, list(run.images.subset(TO_PREPARE))).eval()
    widths = ", ".join(map(str, run.quant.bit_choices))
    tell(f"Calibrating at {widths} bits (effort: {run.config.effort}); run the same command again if it is interrupted")
    views = ImageViews(run.images, run.views, seed=run.config.seed) if run.views > 1 else None
    report = calibrate(
        prepared, run.images, run.config, tune_on=views, checkpoint=run.checkpoint, progress=run.progress
    )
    metrics = {
        "model": run.name,
        "image_settings": run.images.settings.to_dict(),
        "calibration": report.to_dict(),
        "run": {"recipe": "calibrate", "name": f"{run.name}, effort {run.config.effort}", "digest": run.digest},
    }
    save(prepared, run.out, metrics=metrics)
    _check_reloaded(run, prepared)
    run.checkpoint.unlink(missing_ok=True)


def _check_room(run: CalibrationRun) -> None:
    """Raise ConfigError unless the disk has room for the checkpoint and the file."""
    needed = 2 * run.float_bytes
    if (free := shutil.disk_usage(run.out.parent).free) < needed:
        raise ConfigError(
            f"the disk of {run.out.parent} has {free:,} bytes left, and the run needs about {needed:,}; make room, or "
            "choose another --out"
        )


def _read(run: CalibrationRun) -> None:
    """Decode the images, so that one that cannot be read is known before the work, and look at them."""
    if run.images.size < FEW:
        log.warning(
            "%d images are few to calibrate on: what they do not show is clipped; about 1,000 are better",
            run.images.size,
        )
    for place in tracked(range(len(run.images)), "reading images", show=run.progress):
        run.images.pixels(place)
    run.images.check_varied()


def _check_reloaded(run: CalibrationRun, prepared: nn.Module) -> None:
    """Raise ArtifactError unless the file, loaded, gives the outputs of `prepared`, bit for bit."""
    sample = run.images[0][:4].cpu()
    live, prepared = load(run.out, run.model), prepared.cpu()
    for bits in run.quant.bit_choices:
        with at_bits(live, bits), at_bits(prepared, bits), torch.no_grad():
            if not torch.equal(live(sample), prepared(sample)):
                raise ArtifactError(f"{run.out}, loaded, differs from what was calibrated at {bits} bits; report this")


def _to_evaluate(run: CalibrationRun) -> tuple[ImageBatches, str]:
    """The images to measure on, and which these are, in words."""
    if run.evaluation is not None:
        return run.evaluation, f"those of {run.evaluation.folder.resolve().name}"
    if (others := run.images.others(HELD_OUT)) is not None and others.size >= FEW:
        return others, "others of the same folder, not calibrated on"
    return run.images, "the same that it was calibrated on"


def _seen(run: CalibrationRun, images: ImageBatches) -> int:
    """How many of `images` the model was calibrated on."""
    same = images.folder.resolve() == run.images.folder.resolve()
    return len(set(images.names) & set(run.images.names)) if same else 0


def _measure(run: CalibrationRun, images: ImageBatches) -> tuple[Judged, dict[int, Judged]]:
    """The float model, and the file at each width, on `images`."""
    reference = predict(run.model, images, label="float", progress=run.progress)
    live = load(run.out, run.model, device=run.images.device, kernels="float")
    judged = {}
    for bits in run.quant.bit_choices:
        set_bits(live, (bits, run.config.activation_bits or bits))
        found = predict(live, images, label=f"{bits} bits", progress=run.progress)
        judged[bits] = judge(found, images, reference)
    return judge(reference, images, None), judged


def _measured(result: Mapping[str, Any]) -> dict[str, Any]:
    """What the file says of itself once it is measured, in the form that other recipes have too."""
    widths, evaluation = result["widths"], result["evaluation"]
    metrics = {
        "agreement": {bits: one["agreement"] for bits, one in widths.items()},
        "images": {"data": evaluation["folder"], "part": evaluation["which"], "count": evaluation["count"]},
    }
    if evaluation["labels"]:
        metrics["float_top1"] = result["float"]["top1"]
        metrics["top1"] = {bits: one["top1"] for bits, one in widths.items()}
    return metrics
