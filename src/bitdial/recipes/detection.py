"""Detectors on images with instance maps: float fine-tuning, then all widths jointly, or calibrated without labels.

DATA/labels.json lists images, their instance maps and the splits `train` and `val` (see images.instances). The float
detector learns with AdamW and a cosine from 1e-4. The joint stage goes on from it with half of that: each step passes
a batch at every width, with the detector's own losses, and no width has data of its own. No choice is made on `val`:
the last epoch counts, and the numbers are those of the file, loaded.

Steps are in float32 (TF32 convolutions on a GPU): torchvision's anchors take the type of the features, and in bfloat16
they would be pixels off.
"""

import hashlib
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bitdial.artifact import amend, read_artifact, save, sizes
from bitdial.calibrate import CalibrateConfig, calibrate
from bitdial.files.atomic import write_json
from bitdial.images import InstanceAugment, InstanceFolder
from bitdial.live.load import load
from bitdial.models.weights import read_weights
from bitdial.prepare.config import QuantConfig
from bitdial.prepare.measure import take_measure
from bitdial.prepare.own_losses import OwnLosses
from bitdial.prepare.prepare import prepare
from bitdial.recipes.detector_data import DetectionData, DetectionImages
from bitdial.recipes.detector_options import DetectorOptions
from bitdial.recipes.detector_outcome import DetectorOutcome, check_reloaded, listed, look_at, numbers, rounded, rows_of
from bitdial.recipes.detectors import DetectorKind, fill_body, kind_with_weights
from bitdial.recipes.outcome import add_result, run_name, settings_of
from bitdial.recipes.run import RecipeRun
from bitdial.train import Callback, TrainConfig, evaluate, train
from bitdial.train.average_precision import detection_metrics
from bitdial.train.callbacks import Run
from bitdial.train.data import Sample
from bitdial.train.float_loop import train_float

RECIPE = "nuclei-maskrcnn"
DETECTOR = "detector"  # the key of an artifact's metrics that says how to build the float detector
Tell = Callable[[str], None]


def detection(options: DetectorOptions, *, tell: Tell = lambda line: None) -> DetectorOutcome:
    """Train the detector of `options.model` at all widths; save the artifact and its numbers; `tell` shows a line."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    training = InstanceFolder(options.data, "train", count=options.count)
    held_out = InstanceFolder(options.data, "val", count=options.count)
    classes = max(training.largest_class(), held_out.largest_class())
    settings, changed = options.settings()
    sources = {
        "classes": classes,
        "images": len(training),
        "weights": None if options.weights is None else _digest(options.weights),
    }
    name = options.name or run_name(f"{RECIPE}-{options.model.replace(':', '-')}", _short(changed))
    run = RecipeRun(
        recipe=RECIPE,
        name=name,
        options=options,
        settings=settings | sources,
        changed=changed,
        artifact=options.out / f"{name}.safetensors",
        checkpoint=options.out / f"{name}.ckpt",
    )
    with run.alone():
        augment = InstanceAugment(crop=options.crop, turn=True)
        data = DetectionData(
            training, augment, batch_size=options.batch, seed=options.seed, device=device, workers=options.workers
        )
        return _train(run, data, DetectionImages(held_out, device), tell)


def _short(changed: dict[str, Any]) -> dict[str, Any]:
    """What a run's name says besides the model."""
    return {name: value for name, value in changed.items() if name != "model"}


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def model_loss(model: nn.Module, batch: Sample) -> Tensor:
    """The sum of a detector's own losses."""
    return OwnLosses()(model(batch.inputs, batch.targets), None)


def _train(
    run: RecipeRun[DetectorOptions], data: DetectionData, held_out: DetectionImages, tell: Tell
) -> DetectorOutcome:
    options = run.options
    measure = partial(detection_metrics, max_detections=options.max_detections)
    float_model = _float_detector(run, data, tell)
    batches = held_out[:]
    whole = rounded(take_measure(float_model, batches, measure))
    tell(f"Float on {len(batches)} images: {listed(whole)}")
    began = time.monotonic()
    quant = QuantConfig(**settings_of(QuantConfig, run.settings))
    model = prepare(float_model, quant, data.inputs(options.calibration)).eval()
    if options.method == "calibrated":
        tell(f"Calibrating on {options.calibration} images")
        calibrate(
            model,
            data.inputs(options.calibration),
            CalibrateConfig(seed=options.seed),
            checkpoint=run.checkpoint,
            progress=options.progress,
        )
        course: list[dict[str, Any]] = []
    else:
        course = _joint(run, data, model, batches, measure, tell)
    seconds = time.monotonic() - began
    kind = detector_kind(options, int(run.settings["classes"]))
    metrics = {"recipe": RECIPE, "model": options.model, DETECTOR: kind.to_dict(), "run": run.record()}
    save(model, run.artifact, metrics=metrics | {"float_ap": whole})
    live = load(run.artifact, float_model, device=data.device, kernels="float")
    result = numbers(run, live, float_model, batches, measure) | {"float": whole, "course": course, "seconds": seconds}
    measured_on = {"data": result["data"]["folder"], "part": "the split val", "count": len(batches)}
    amend(run.artifact, metrics={"ap": result["widths"], "images": measured_on})
    seen = look_at(live, float_model, held_out, options.bit_choices, count=options.pictures)
    check_reloaded(run, model, float_model, batches[0][0])
    size = sizes(read_artifact(run.artifact))
    result["bytes"] = {
        "float": sum(tensor.nbytes for tensor in float_model.state_dict().values()),
        "artifact": size["file"],
        "separate": {str(bits): count for bits, count in size["separate"].items()},
    }
    rows = rows_of(run, result)
    write_json(run.artifact.with_suffix(".json"), result)
    if options.results is not None:
        add_result(options.results, *rows)
    run.checkpoint.unlink(missing_ok=True)
    return DetectorOutcome(float_model=float_model, artifact=run.artifact, result=result, rows=rows, seen=seen)


def _float_detector(run: RecipeRun[DetectorOptions], data: DetectionData, tell: Tell) -> nn.Module:
    """The float detector, trained, or taken from the folder of the run, where it is kept for other runs."""
    options, settings = run.options, run.options.float_settings()
    kind = detector_kind(options, int(run.settings["classes"]))
    model = kind.build(seed=options.seed)
    if options.weights is not None:
        fill_body(model, read_weights(options.weights))
    model = model.to(data.device)
    facts = settings | {name: run.settings[name] for name in ("classes", "images", "weights")}
    digest = hashlib.sha256(repr(sorted(facts.items())).encode()).hexdigest()[:8]
    kept = options.out / f"float-{options.model.replace(':', '-')}-{options.seed}-{digest}.ckpt"
    if not kept.exists():
        tell(f"Training {options.model} in float for {options.float_epochs} epochs of {len(data)} batches")
    train_float(
        model,
        data,
        epochs=options.float_epochs,
        lr=options.float_lr,
        weight_decay=options.weight_decay,
        optimizer="adamw",
        checkpoint=kept,
        batch_loss=model_loss,
        clip_norm=options.clip_norm,
        progress=options.progress,
    )
    return model


def detector_kind(options: DetectorOptions, classes: int) -> DetectorKind:
    """The detector that the options ask for."""
    kind = DetectorKind(name=options.model, classes=classes, size=options.size, max_detections=options.max_detections)
    return kind if options.weights is None else kind_with_weights(kind, read_weights(options.weights))


def _joint(
    run: RecipeRun[DetectorOptions], data: DetectionData, model: nn.Module, batches: Any, measure: Any, tell: Tell
) -> list[dict[str, Any]]:
    """The joint stage; returns the precision by width as it went."""
    options = run.options
    config = TrainConfig(
        **settings_of(TrainConfig, {k: v for k, v in run.settings.items() if k != "start"}),
        optimizer="adamw",
        checkpoint_every=options.checkpoint_every,
        autocast=None,
        cuda_graph=False,
        fused=False,
    )
    watch = _Watch(batches, options.bit_choices, measure, options.evaluate_every, tell)
    train(
        model,
        data,
        config,
        loss=OwnLosses(),
        callbacks=[watch],
        checkpoint=run.checkpoint,
        progress=options.progress,
    )
    return watch.course


class _Watch(Callback):
    """Takes the precision at each width before the first step and every so many epochs, and tells it."""

    def __init__(self, batches: Any, widths: tuple[int, ...], measure: Any, every: int, tell: Tell):
        self.batches, self.widths, self.measure, self.every, self.tell = batches, widths, measure, every, tell
        self.course: list[dict[str, Any]] = []

    def on_start(self, run: Run) -> None:
        """Measure the start, unless a checkpoint knows it."""
        if run.step:
            self.tell(f"Going on from step {run.step} of {run.total_steps}")
        elif not self.course:
            self._take(run, 0)

    def on_epoch(self, run: Run) -> None:
        """Measure, where it is due."""
        epoch = run.epoch + 1
        if epoch % self.every == 0 and epoch < run.config.epochs:
            self._take(run, epoch)

    def _take(self, run: Run, epoch: int) -> None:
        found = evaluate(run.model, self.batches, self.widths, measure=self.measure)
        by_width = {str(bits): rounded(values) for bits, values in found.items()}
        self.course.append({"epoch": epoch, "widths": by_width})
        for bits, values in by_width.items():
            self.tell(f"Epoch {epoch} of {run.config.epochs}, {bits} bits: {listed(values)}")

    def state_dict(self) -> dict[str, Any]:
        """What was measured."""
        return {"course": self.course}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it back."""
        self.course = state["course"]
