"""Detectors on the command line: `bitdial train nuclei-maskrcnn` and `bitdial eval FILE --detection DIR`."""

import argparse
import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

from bitdial.artifact import Artifact, read_artifact
from bitdial.cli.arguments import resolve_setting
from bitdial.cli.detection_options import MADE_UP
from bitdial.cli.tables import setting_label, show_table
from bitdial.dial.dial import at_bits
from bitdial.errors import ConfigError
from bitdial.images import InstanceFolder
from bitdial.images.made_up import write_made_up
from bitdial.live.load import load
from bitdial.prepare.measure import take_measure
from bitdial.recipes.detection import DETECTOR, detection
from bitdial.recipes.detector_data import DetectionImages
from bitdial.recipes.detector_options import DetectorOptions
from bitdial.recipes.detector_outcome import Seen
from bitdial.recipes.detectors import DetectorKind
from bitdial.recipes.run import FinishedRun, describe_images
from bitdial.report import Shots, detection_report, panel
from bitdial.report.charts.detection import drop_text, points_text
from bitdial.train.average_precision import detection_metrics

COLUMNS = {"box_ap": "box AP", "box_ap50": "box AP50", "mask_ap": "mask AP", "mask_ap50": "mask AP50"}
# What --dry-run says where the command line does not.
DRY_RUN: dict[str, Any] = {
    "model": "tiny_detector", "float_epochs": 40, "float_lr": 5e-3, "epochs": 8, "lr": 5e-4, "batch": 4, "crop": 64,
    "calibration": 8, "name": "dry-run",
}  # fmt: skip


def run_train(options: argparse.Namespace) -> None:
    """Train, write the page, and show the precisions; of a run that is finished, those of its file."""
    given = {f.name: getattr(options, f.name) for f in dataclasses.fields(DetectorOptions) if f.name in options}
    if "dry_run" in options:
        given = DRY_RUN | given | {"data": options.out / MADE_UP}
        write_made_up(given["data"])
    try:
        outcome = detection(DetectorOptions(**given), tell=print)
    except FinishedRun as found:
        _show(found.artifact.metrics)
        print(f"{found.path} is there: this run is finished. To train it again, add --replace")
        return
    page = outcome.artifact.with_suffix(".html")
    detection_report(page, outcome.result, [_shots(one) for one in outcome.seen])
    _show(read_artifact(outcome.artifact).metrics)
    print(f"Saved {outcome.artifact}, {outcome.artifact.with_suffix('.json').name} and {page.name}")


def _shots(seen: Seen) -> Shots:
    """The pictures of one image, each beside the float model's."""
    reference = seen.found["float"]
    panels = [panel(name, seen.image, found, reference) for name, found in seen.found.items()]
    return Shots(seen.name, seen.objects, panels)


def _show(metrics: Mapping[str, Any]) -> None:
    level, widths = metrics["float_ap"], metrics["ap"]
    names = [name for name in COLUMNS if name in level]
    rows = [["float", *(points_text(level[name]) for name in names), "", ""]]
    for bits, values in widths.items():
        drops = [drop_text(values[name], level[name]) if name in level else "" for name in ("box_ap", "mask_ap")]
        rows.append([f"{bits} bits", *(points_text(values[name]) for name in names), *drops])
    columns = ["setting", *(COLUMNS[name] for name in names), "box AP to float", "mask AP to float"]
    show_table(f"{metrics['model']} at every width", columns, rows)
    print(f"On {describe_images(metrics['images'])}; average precisions in points")


def run_eval(options: argparse.Namespace) -> None:
    """The command `eval` on a folder of images and instance maps: precision at each width and stored plan."""
    artifact = read_artifact(options.file)
    settings = [(s, resolve_setting(s, artifact)) for s in options.bits or (*artifact.bit_choices, *artifact.plans)]
    split = None if options.split == "all" else options.split
    folder = InstanceFolder(options.detection, split, count=options.count)
    images = DetectionImages(folder, options.device)
    kind = kind_of(artifact, options)
    model = None if artifact.manifest["architecture"] is not None else kind.build()
    live = load(artifact, model, device=options.device, kernels=options.kernels or "float")
    most = options.max_detections or kind.max_detections
    rows: list[list[str]] = []
    names: list[str] = []
    for setting, bits in settings:
        with at_bits(live, bits):
            found: Any = take_measure(live, images, partial(detection_metrics, max_detections=most))
        names = [name for name in COLUMNS if name in found]
        rows.append([setting_label(setting), *(points_text(found[name]) for name in names)])
    show_table(str(options.file), ["setting", *(COLUMNS[name] for name in names)], rows)
    print(f"Average precision in points on {len(images):,} images of {options.detection}, up to {most} objects each")


def kind_of(artifact: Artifact, options: argparse.Namespace) -> DetectorKind:
    """How the float detector of the file is built: as the file says, or with the name and classes that are given."""
    stored = artifact.metrics.get(DETECTOR)
    if isinstance(stored, dict):
        try:
            return DetectorKind.from_dict(stored)
        except (ConfigError, TypeError) as problem:
            raise ConfigError(f"{options.file}: what it says of its detector is not usable: {problem}") from problem
    architecture = artifact.manifest["architecture"]
    if options.model is None and architecture is None:
        raise ConfigError(
            f"{options.file} does not say which detector it is of; name it with --model torchvision:NAME --classes N"
        )
    name = options.model or architecture["name"]
    return DetectorKind(name=name, classes=options.classes or 1)


def unused(options: argparse.Namespace) -> list[str]:
    """Options of `eval` that are for classifiers, of those that were given."""
    return [name for name in ("data", "images", "labels", "weights") if getattr(options, name) is not None]
