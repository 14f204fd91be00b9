"""ImageNet, or any images in folders by class: all widths jointly, from float weights or from an artifact.

    DATA/train/<class>/*.jpg    DATA/val/<class>/*.jpg

The defaults are the paper's (section 4.1, "Setup"): a float network that is trained already, Adam, learning rate 5e-4,
weight decay 5e-5, batches of 256 over all processes, 90 epochs, a cosine to 0 without warm-up, widths 8, 6, 4 and 2 (or
4, 3, 2), the first and the last layer in float. Training takes random parts of images scaled to 224 x 224 and mirrors
half of them. Evaluation takes the middle 224 x 224 of images whose short side is scaled to 256 where it is longer; the
paper prints "256 x 256", which would change the shapes of things. What it does not print (area and shape of the random
parts) is as it is commonly done: 8 % to 100 %, 3:4 to 4:3.

Under torchrun each process reads and trains on its share, and process 0 writes.
"""

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bitdial.artifact import Artifact, read_artifact, save
from bitdial.dial.dial import at_bits
from bitdial.errors import ConfigError
from bitdial.images import ImageSettings, stored_settings
from bitdial.images.settings import STORED
from bitdial.live.load import load_trainable
from bitdial.prepare.config import QuantConfig
from bitdial.prepare.model_call import evaluating
from bitdial.prepare.prepare import prepare
from bitdial.recipes.cifar10_training import autocast_on, result_row
from bitdial.recipes.float_weights import FloatWeights, read_float_weights
from bitdial.recipes.image_batches import EvaluationData, FolderData, Reading, settings_for, usual_workers
from bitdial.recipes.image_folder import ImageList, list_images
from bitdial.recipes.outcome import RecipeOptions, RecipeOutcome, add_result, run_name, settings_of, write_history
from bitdial.recipes.run import RecipeRun
from bitdial.train import Callback, TrainConfig, accuracy, distributed, recalibrate_norms, train
from bitdial.train.callbacks import Run

BATCH, SIZE = 256, 224
CALIBRATION = 256  # training images that scales start from
HELD_OUT_EVERY = 25  # with --holdout, of the training images
CHECKPOINT_EVERY = 1000  # steps
_NOT_HERE = ("cutout", "float_epochs", "teacher")
_OF_THE_FILE = ("scheme", "ties", "per_channel", "start", "scale_gradient")


def imagenet(options: RecipeOptions) -> RecipeOutcome:
    """Train the model of `options.weights` or `options.start_from` at all widths; save the artifact, add a result row.

    Accuracy is taken at each width after each epoch, on DATA/val; with `options.holdout` on every 25th training image,
    which then is not trained on, and DATA/val stays unread.
    """
    options.refuse(_NOT_HERE, "imagenet")
    if options.sampling != "none":
        raise ConfigError("the recipe imagenet trains every width, not sampled plans: leave --sampling out")
    device = distributed.own_device()
    with distributed.joined(device):
        start = _Start.read(options)
        images = _Images.read(options)
        settings, changed = options.settings(epochs=TrainConfig.epochs, lr=TrainConfig.lr, batch=BATCH, size=SIZE)
        if start.artifact is not None:
            settings["bit_choices"] = start.artifact.bit_choices
        name = options.name or run_name(f"imagenet-{start.model}-{start.digest[:8]}", changed)
        run = RecipeRun(
            recipe="imagenet",
            name=name,
            options=options,
            settings=settings | start.settings() | images.settings(),
            changed=changed,
            artifact=options.out / f"{name}.safetensors",
            checkpoint=options.out / f"{name}.ckpt",
        )
        with run.alone(), torch.backends.cudnn.flags(enabled=True, benchmark=True):
            outcome = _train(run, start, images, device)
            distributed.barrier()  # what process 0 wrote is there
        return outcome


@dataclass(frozen=True)
class _Start:
    """What a run begins with: float weights, or the artifact of a prepared model, or both."""

    model: str
    images: ImageSettings  # their normalisation counts; their sizes are the run's
    weights: FloatWeights | None
    artifact: Artifact | None

    @classmethod
    def read(cls, options: RecipeOptions) -> "_Start":
        """From the files that the options name; ConfigError if they do not go together."""
        weights = None if options.weights is None else read_float_weights(options.weights)
        artifact = None if options.start_from is None else _read_artifact(options)
        if artifact is None and weights is None:
            raise ConfigError(
                "this recipe starts from a trained float network (--weights FILE.safetensors, see "
                "tools/imagenet_weights.py) or from a file of bitdial's (--start-from FILE)"
            )
        if weights is None and options.taught:
            raise ConfigError(f"--distill {options.distill}: the float network teaches; say --weights FILE too")
        named = {
            "--model": options.model,
            str(options.weights): None if weights is None else weights.name,
            str(options.start_from): None if artifact is None else artifact.manifest["architecture"]["name"],
        }
        models = {where: name for where, name in named.items() if name is not None}
        if len(set(models.values())) > 1:
            raise ConfigError("of different models: " + ", ".join(f"{where} {name}" for where, name in models.items()))
        images = weights.images if weights is not None else None
        if images is None and artifact is not None:
            images = stored_settings(artifact.metrics, options.start_from)
        if images is None:
            raise ConfigError(
                f"{options.start_from} does not say how images become its input; name the float weights that it was "
                "made of too: --weights FILE"
            )
        return cls(next(iter(models.values())), images, weights, artifact)

    @property
    def digest(self) -> str:
        """That of the file whose weights are trained on."""
        if self.artifact is not None:
            return self.artifact.digest
        assert self.weights is not None
        return self.weights.digest

    def settings(self) -> dict[str, Any]:
        """What a run's record says of it."""
        weights = None if self.weights is None else self.weights.digest
        return {"model": self.model, "weights": weights, "start_from": self.artifact and self.artifact.digest}


def _read_artifact(options: RecipeOptions) -> Artifact:
    """The file of `options.start_from`, if it goes with the options."""
    assert options.start_from is not None
    artifact = read_artifact(options.start_from)
    if not isinstance(artifact.manifest["architecture"], dict):
        raise ConfigError(
            f"{options.start_from} is of a model that bitdial does not build; train it in Python: train()"
        )
    if options.bit_choices not in (QuantConfig.bit_choices, artifact.bit_choices):
        raise ConfigError(f"the widths of {options.start_from} are {artifact.bit_choices}; leave --bits out")
    if given := [name for name in _OF_THE_FILE if getattr(options, name) != getattr(type(options), name)]:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ConfigError(f"{flags}: not for a run that starts from a file of bitdial's; leave it out")
    return artifact


@dataclass(frozen=True)
class _Images:
    """The images to train on and those to evaluate on."""

    data: Path
    train: ImageList
    held: ImageList
    part: str  # which the latter are

    @classmethod
    def read(cls, options: RecipeOptions) -> "_Images":
        """From the folders below `options.data`."""
        data = options.data or Path("data")
        images = list_images(data / "train")
        if options.holdout:
            chosen = np.arange(len(images)) % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
            if not chosen.any():
                raise ConfigError(f"{data} has {len(images)} training images, too few to hold every 25th out")
            return cls(data, images.subset(~chosen), images.subset(chosen), "held out of the training set")
        held = list_images(data / "val")
        if held.classes != images.classes:
            odd = sorted(set(held.classes) ^ set(images.classes))
            raise ConfigError(f"{data}: train and val have different classes, such as {odd[0]!r}")
        return cls(data, images, held, "the validation set")

    def settings(self) -> dict[str, Any]:
        """What a run's record says of them."""
        return {"classes": len(self.train.classes), "images": len(self.train)}


def _train(run: RecipeRun[RecipeOptions], start: _Start, images: _Images, device: torch.device) -> RecipeOutcome:
    options, settings, widths = run.options, run.settings, tuple(run.settings["bit_choices"])
    workers = usual_workers() if options.workers is None else options.workers
    reading = Reading(settings_for(settings["size"], start.images), workers, device)
    rank, world = distributed.rank(), distributed.world_size()
    held = EvaluationData(images.held, reading, rank=rank, world=world)
    precision: dict[str, Any] = {"autocast": autocast_on(device), "checkpoint_every": CHECKPOINT_EVERY}
    config = TrainConfig(**settings_of(TrainConfig, settings), **precision)
    float_model, whole = None, False
    if start.weights is not None:
        float_model, whole = start.weights.build(len(images.train.classes), options.seed)
        float_model = float_model.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    model = _prepared(run, start, images, reading, float_model)
    data = FolderData(images.train, reading, batch_size=settings["batch"], seed=options.seed)
    history = train(
        model,
        data,
        config,
        teacher=float_model if options.taught else None,
        callbacks=[Validation(held, widths)],
        checkpoint=run.checkpoint,
        progress=options.progress,
    )
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        for bits in widths if settings["recalibrate"] else ():
            share = islice(data.batches(config.epochs, rank=rank, world=world), settings["recalibrate"])
            recalibrate_norms(model, (batch.inputs for batch in share), bits)
            with at_bits(model, bits):
                distributed.average_norms(model)
        float_top1 = None if start.artifact is None else start.artifact.metrics.get("float_top1")
        if float_model is not None and whole:
            float_top1 = accuracies(float_model, held, (None,))[None]
        top1 = {int(bits): found for bits, found in accuracies(model, held, widths).items() if bits is not None}
    metrics = run.metrics(float_top1=float_top1, top1=top1, data="", test=[])
    metrics["images"] = {"data": images.data.resolve().name, "part": images.part, "count": len(images.held)}
    metrics[STORED] = reading.settings.to_dict()
    outcome = RecipeOutcome(
        model=model,
        float_model=float_model,
        artifact=run.artifact,
        history=history,
        metrics=metrics,
        float_top1=float_top1,
        top1=top1,
        test=held,
    )
    if rank == 0:
        _write(run, start, images, outcome, device)
    return outcome


def _write(
    run: RecipeRun[RecipeOptions], start: _Start, images: _Images, outcome: RecipeOutcome, device: torch.device
) -> None:
    """Save the artifact, then add the row and the history that were asked for."""
    options, settings = run.options, run.settings
    save(outcome.model, run.artifact, metrics=outcome.metrics)
    if start.artifact is not None:
        settings = settings | {"scheme": start.artifact.scheme}
    row = {"model": start.model, "processes": distributed.world_size()}
    row |= result_row(settings, run.changed, outcome.metrics, outcome.history, device)
    row |= {"split": "holdout" if options.holdout else "val", "start_from": start.digest, **images.settings()}
    row["command"] = options.command
    if options.history is not None:
        write_history(options.history, outcome.history, row)
    if options.results is not None:
        add_result(options.results, row)
    run.checkpoint.unlink()


def _prepared(
    run: RecipeRun[RecipeOptions], start: _Start, images: _Images, reading: Reading, float_model: nn.Module | None
) -> nn.Module:
    """The model to train: that of the artifact, or the float one prepared on some training images."""
    classes, device = len(images.train.classes), reading.device
    if start.artifact is None:
        assert float_model is not None
        order = np.random.default_rng(run.options.seed).permutation(len(images.train))
        chosen = np.isin(np.arange(len(order)), order[:CALIBRATION])
        calibration = [inputs for inputs, _ in EvaluationData(images.train.subset(chosen), reading)]
        return prepare(float_model, QuantConfig(**settings_of(QuantConfig, run.settings)), calibration)
    model = load_trainable(start.artifact).to(device)
    with evaluating(model):
        found = model(torch.zeros(1, 3, reading.settings.crop, reading.settings.crop, device=device)).shape[-1]
    if found != classes:
        raise ConfigError(
            f"{run.options.start_from} is for {found} classes, and {images.data} has {classes}; start from --weights "
            "to learn others"
        )
    return model


class Validation(Callback):
    """Puts the accuracy at each of `bit_choices` into the row of each epoch; every image is read once for all."""

    def __init__(self, held: Iterable[tuple[Tensor, Tensor]], bit_choices: tuple[int, ...]):
        self.held, self.bit_choices = held, bit_choices

    def on_epoch(self, run: Run) -> None:
        """Evaluate."""
        assert run.row is not None
        found = accuracies(run.model, self.held, self.bit_choices)
        run.row["top1"] = {str(bits): top1 for bits, top1 in found.items()}


def accuracies(
    model: nn.Module, held: Iterable[tuple[Tensor, Tensor]], settings: tuple[int | None, ...]
) -> dict[int | None, float]:
    """The share of images that are right at each setting, over what all processes have in `held`.

    A setting is a width, or None for a float model.
    """
    right, seen = dict.fromkeys(settings, 0), 0
    for batch in held:
        count = len(batch[1])
        seen += count
        for bits in settings:
            with nullcontext() if bits is None else at_bits(model, bits):
                right[bits] += round(accuracy(model, [batch]) * count)
    everything = distributed.total(seen)
    return {bits: distributed.total(value) / everything for bits, value in right.items()}
