"""The commands `bitdial eval` and `bitdial switch`."""

import argparse
import statistics
import time

import torch

from bitdial.artifact import read_artifact
from bitdial.cli import detection, images
from bitdial.cli.arguments import resolve_setting
from bitdial.cli.data import accuracy_on, recipe_of, test_data
from bitdial.cli.tables import setting_label, show_table
from bitdial.dial.dial import set_bits
from bitdial.errors import ConfigError
from bitdial.live.load import load
from bitdial.recipes import TEST_DATA


def run_eval(options: argparse.Namespace) -> None:
    """The command `eval`."""
    if options.detection is not None:
        if given := detection.unused(options) + images.given_settings(options):
            raise ConfigError(f"--{given[0]} is for classifiers, and --detection for detectors; leave one of them out")
        detection.run_eval(options)
        return
    if options.max_detections is not None:
        raise ConfigError("--max-detections is for detectors; give --detection DIR too, or leave it out")
    if options.images is not None:
        if options.data is not None:
            raise ConfigError("--data and --images are different data; give one of them")
        images.run_eval(options)
        return
    given = [name for name in ("labels", "count", "model", "weights") if getattr(options, name) is not None]
    if given := given + images.given_settings(options):
        raise ConfigError(f"--{given[0]} is for folders of images; give --images DIR too, or leave it out")
    artifact = read_artifact(options.file)
    settings = [(setting, resolve_setting(setting, artifact)) for setting in options.bits or artifact.bit_choices]
    live = load(artifact, device=options.device, kernels=options.kernels)
    data, which = test_data(options.data, artifact)
    rows = []
    for setting, bits in settings:
        set_bits(live, bits)
        rows.append([setting_label(setting), f"{100 * accuracy_on(live, data, options.device):.2f} %"])
    show_table(str(options.file), ["setting", "accuracy"], rows)
    print(f"Accuracy on {which}")


def run_switch(options: argparse.Namespace) -> None:
    """The command `switch`."""
    artifact = read_artifact(options.file)
    target = resolve_setting(options.bits, artifact)
    live = load(artifact, device=options.device, kernels=options.kernels)
    wait = torch.cuda.synchronize if options.device == "cuda" else lambda: None
    rows = []
    for start in artifact.bit_choices:
        times = []
        for _ in range(20):
            set_bits(live, start)
            wait()
            began = time.perf_counter()
            set_bits(live, target)
            wait()
            times.append(1e3 * (time.perf_counter() - began))
        rows.append([f"{start} bits", setting_label(options.bits), f"{statistics.median(times):.2f} ms"])
    show_table("Switching while live (median of 20)", ["from", "to", "time"], rows)
    if options.data or recipe_of(artifact) in TEST_DATA:
        data, which = test_data(options.data, artifact)
        print(f"Accuracy there: {100 * accuracy_on(live, data, options.device):.2f} % on {which}")
