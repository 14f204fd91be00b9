"""Folders of images on the command line: settings, the float model of a file, and `bitdial eval FILE --images DIR`."""

import argparse
import dataclasses
import os
from pathlib import Path
from typing import Any

from torch import nn

from bitdial.artifact import Artifact, read_artifact
from bitdial.cli.arguments import resolve_setting
from bitdial.cli.data import fitting
from bitdial.cli.tables import percent, setting_label, show_table
from bitdial.dial.dial import set_bits
from bitdial.errors import ConfigError
from bitdial.images import ImageBatches, ImageSettings, settings_of_model, settings_of_weights, stored_settings
from bitdial.live.load import load
from bitdial.live.skeleton import built
from bitdial.models.by_name import model_by_name
from bitdial.models.weights import fill, read_weights
from bitdial.recipes.classes import Judged, Predicted, judge, predict
from bitdial.report.numbers import Samples, interval_text


def chosen_settings(options: argparse.Namespace, *known: ImageSettings | None) -> ImageSettings:
    """The first of the `known` settings that is not None, else the usual ones, with what `options` say instead."""
    base = next((one for one in known if one is not None), ImageSettings())
    return dataclasses.replace(base, **{name: getattr(options, name) for name in given_settings(options)})


def settings_of(model: nn.Module | None, weights: str | os.PathLike[str] | None) -> list[ImageSettings | None]:
    """What a file of weights says of images, and what is known of the model."""
    return [
        None if weights is None else settings_of_weights(weights),
        None if model is None else settings_of_model(model),
    ]


def run_eval(options: argparse.Namespace) -> None:
    """The command `eval` on a folder of images."""
    artifact = read_artifact(options.file)
    settings = [(s, resolve_setting(s, artifact)) for s in options.bits or (*artifact.bit_choices, *artifact.plans)]
    model = float_model(options, artifact, options.weights)
    images = ImageBatches(
        options.images,
        chosen_settings(
            options,
            stored_settings(artifact.metrics, options.file),
            *settings_of(model, weights_of(options, options.weights)),
        ),
        batch_size=options.batch_size,
        count=options.count,
        labels=options.labels,
        device=options.device,
    )
    print(f"Images: {images.settings}")
    live = load(artifact, model, device=options.device, kernels=options.kernels)
    with fitting(images[0]):
        reference, name = _reference(options, model, live, images, artifact)
        rows = [["float", *_cells(judge(reference, images, None), images)]] if name == "float" else []
        for setting, bits in settings:
            set_bits(live, bits)
            label = setting_label(setting)
            found = predict(live, images, label=label, progress=True)
            rows.append([label, *_cells(judge(found, images, reference), images)])
    accuracy = ["accuracy", "95 % interval"] if images.labels is not None else []
    show_table(str(options.file), ["setting", *accuracy, f"agrees with {name}"], rows)
    print(f"On {images.size:,} images of {options.images}" + ("" if accuracy else ", without labels"))


def _cells(judged: Judged, images: ImageBatches) -> list[str]:
    agreement = percent(judged.agreement)
    if judged.top1 is None:
        return [agreement]
    return [percent(judged.top1), interval_text(Samples(images.size, "images").interval(judged.top1)), agreement]


def _reference(
    options: argparse.Namespace, model: nn.Module | None, live: nn.Module, images: ImageBatches, artifact: Artifact
) -> tuple[Predicted, str]:
    """What the settings are compared with, and its name: the float model if it has weights, else the highest width."""
    if model is not None and weights_of(options, options.weights) is not None:
        return predict(model.to(options.device), images, label="float", progress=True), "float"
    set_bits(live, artifact.bit_choices[0])
    name = setting_label(artifact.bit_choices[0])
    return predict(live, images, label=name, progress=True), name


def float_model(options: argparse.Namespace, artifact: Artifact, weights: Path | None) -> nn.Module | None:
    """The model that `--model` and `weights` name; None where the file alone will do."""
    stored: Any = artifact.metrics.get("model")
    architecture = artifact.manifest["architecture"]
    name = options.model or (architecture["name"] if architecture else stored)
    if options.model is None and weights is None:
        if architecture is None and isinstance(stored, str):
            raise ConfigError(f"{options.file} is of the model {stored}; pass --model {stored}")
        return None
    if not isinstance(name, str):
        raise ConfigError(f"{options.file} does not say which model it is of; name it with --model")
    if options.model is None and architecture is not None and weights is not None:
        content = read_weights(weights)
        if content.metadata.model is None:  # then the file knows best
            model = built(artifact)
            fill(model, content, name)
            return model.eval()
    return model_by_name(name, weights, classes=options.classes)[0]


def weights_of(options: argparse.Namespace, weights: Path | None) -> Path | None:
    """The file that the model of `float_model` has its weights from; None if its values are random."""
    return Path(options.model) if weights is None and str(options.model).endswith(".safetensors") else weights


def given_settings(options: argparse.Namespace) -> list[str]:
    """The names of the image settings that `options` has."""
    return [f.name for f in dataclasses.fields(ImageSettings) if f.name in options]
