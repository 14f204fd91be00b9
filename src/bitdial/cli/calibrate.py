"""The command `bitdial calibrate`."""

import argparse
import time
from typing import Any

from bitdial.calibrate import CalibrateConfig
from bitdial.cli.data import fitting
from bitdial.cli.images import chosen_settings, settings_of
from bitdial.cli.places import writing
from bitdial.cli.tables import percent, show_table
from bitdial.errors import ConfigError
from bitdial.images import ImageBatches
from bitdial.models.by_name import model_by_name
from bitdial.prepare.config import QuantConfig
from bitdial.recipes.calibration import CalibrationRun, check_out, run_calibration
from bitdial.recipes.classes import check_labels, predict
from bitdial.report import Samples, calibration_report
from bitdial.report.numbers import interval_text

FIRST_LAST: dict[str, Any] = {"float": True, "8": 8, "same": False}
VIEWS = {"quick": 1, "medium": 1, "full": 4}


def run(options: argparse.Namespace) -> None:
    """Calibrate, save, write the page, and show what came out."""
    began = time.monotonic()
    check_out(options.out)
    beside = {"the numbers": options.out.with_suffix(".json"), "the page": options.out.with_suffix(".html")}
    with writing(options, {"--out": options.out, **beside}):
        run = _run_of(options)
        print(f"Images: {run.images.settings}")
        result = run_calibration(run, tell=print)
        calibration_report(run.page, result)
    _show(result)
    size = result["bytes"]
    print(
        f"Saved {run.out} ({size['artifact']:,} bytes; float: {size['float']:,}), {run.numbers.name} and "
        f"{run.page.name}, in {time.monotonic() - began:.0f} s"
    )


def _run_of(options: argparse.Namespace) -> CalibrationRun:
    """What is asked for, tried on one image before any work."""
    quant = QuantConfig(
        bit_choices=options.bits,
        scheme=options.scheme,
        group_size=options.group_size,
        keep_first_last=FIRST_LAST[options.first_last],
        start="balanced",
    )
    weights = options.model if options.model.endswith(".safetensors") else options.weights
    if weights is None:
        raise ConfigError(
            f"--weights is missing: without them {options.model} has random values, and bitdial downloads nothing; "
            "give a safetensors file"
        )
    model, name = model_by_name(options.model, options.weights, classes=options.classes)
    model = model.to(options.device)
    settings = chosen_settings(options, *settings_of(model, weights))
    common: dict[str, Any] = {"batch_size": options.batch_size, "device": options.device}
    images = ImageBatches(
        options.images,
        settings,
        count=options.count,
        labels=options.labels if options.eval_images is None else None,
        **common,
    )
    evaluation = None
    if options.eval_images is not None:
        evaluation = ImageBatches(
            options.eval_images, settings, count=options.eval_count, labels=options.labels, **common
        )
    elif options.eval_count is not None:
        raise ConfigError("--eval-count needs --eval-images DIR")
    one = images.subset(1)
    with fitting(one[0]):
        outputs = predict(model, one).outputs
    measured = evaluation or images
    if measured.labels is not None:
        check_labels(measured, outputs)
    return CalibrationRun(
        name=name,
        model=model,
        images=images,
        evaluation=evaluation,
        quant=quant,
        config=CalibrateConfig(
            effort=options.effort,
            activation_bits=options.activation_bits,
            iterations=options.iterations,
            seed=options.seed,
        ),
        out=options.out,
        views=options.views or VIEWS[options.effort],
        replace=options.replace,
    )


def _show(result: dict[str, Any]) -> None:
    evaluation, level = result["evaluation"], result["float"]["top1"]
    samples, labels = Samples(evaluation["count"], "images"), evaluation["labels"]
    rows = [["float", percent(level), interval_text(samples.interval(level)), ""]] if labels else []
    for bits, one in result["widths"].items():
        cells = [percent(one["top1"]), interval_text(samples.interval(one["top1"]))] if labels else []
        rows.append([f"{bits} bits", *cells, percent(one["agreement"])])
    columns = ["setting", *(["accuracy", "95 % interval"] if labels else []), "agrees with float"]
    show_table(f"{result['model']} at every width", columns, rows)
    print(f"On {evaluation['count']:,} images: {evaluation['which']}")
