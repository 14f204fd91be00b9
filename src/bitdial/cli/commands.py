"""The commands, and the ways out: every error is explained in a line."""

import argparse
import dataclasses
import json
import logging
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bitdial.artifact import read_artifact, sizes
from bitdial.cli.arguments import (
    BITS_HELP,
    bit_list,
    bits_setting,
    file_argument,
    positive,
    resolve_setting,
    seed,
    test_data_argument,
    weight_scheme,
)
from bitdial.cli.data import accuracy_on, recipe_of, test_data
from bitdial.cli.export import export_command
from bitdial.cli.mixed import pareto_command, search_command, sensitivity_command, show_correlation
from bitdial.cli.tables import bits_text, number, percent, setting_label, show_table
from bitdial.dial.dial import set_bits
from bitdial.errors import BitdialError
from bitdial.functional import SCHEMES, TIE_RULES, scheme_of
from bitdial.live.kernel_choice import KERNELS
from bitdial.live.load import load
from bitdial.prepare.config import SCALE_GRADIENTS, STARTS
from bitdial.recipes import NORM_FORMS, RECIPES, TEACHERS, TEST_DATA, RecipeOptions
from bitdial.train.alrs import READINGS
from bitdial.train.config import DISTILLATIONS, OPTIMIZERS, SAMPLINGS, SCALE_STATES, UPDATES


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 done, 1 an error that was explained, 2 wrong usage, 130 interrupted."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parser().parse_args(arguments)
    options.command = shlex.join(["bitdial", *arguments])
    logging.basicConfig(level=logging.INFO if options.verbose else logging.WARNING, format="%(message)s")
    try:
        options.run(options)
    except BitdialError as problem:
        print(f"bitdial: {problem}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("bitdial: interrupted", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bitdial", description="Train a network once, ship one integer file, run it at any bit-width."
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="say more about what happens")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="the whole path on embedded data, in about a minute")
    demo.add_argument("--out", type=Path, default=Path("demo-out"), help="folder for the results (default: demo-out)")
    demo.add_argument(
        "--mixed", action="store_true", help="mixed precision: bits by layer, found for budgets, in about a minute"
    )
    demo.set_defaults(run=_demo)

    _train_command(commands.add_parser("train", help="run a training recipe; run it again to resume"))

    evaluate = commands.add_parser("eval", help="accuracy of an artifact at each width")
    file_argument(evaluate)
    evaluate.add_argument(
        "--bits",
        type=bits_setting,
        action="append",
        metavar="B",
        help=f"{BITS_HELP}; repeat for several (default: every width)",
    )
    _live_arguments(evaluate)
    test_data_argument(evaluate)
    evaluate.set_defaults(run=_eval)

    inspect = commands.add_parser("inspect", help="what an artifact holds, checked against its digest")
    file_argument(inspect)
    inspect.add_argument("--json", action="store_true", help="print JSON instead of tables")
    inspect.set_defaults(run=_inspect)

    switch = commands.add_parser("switch", help="switch an artifact while it is live; time it and evaluate there")
    file_argument(switch)
    switch.add_argument("--bits", type=bits_setting, required=True, metavar="B", help=BITS_HELP)
    _live_arguments(switch)
    test_data_argument(switch)
    switch.set_defaults(run=_switch)

    export_command(commands.add_parser("export", help="an ONNX file at one setting, or a transformers folder"))
    sensitivity_command(commands.add_parser("sensitivity", help="Hessian trace of each layer: which ones need bits"))
    search_command(commands.add_parser("search", help="the best plan within budgets, by the stored sensitivities"))
    pareto_command(
        commands.add_parser("pareto", help="measure many plans, store those that no other beats, and a page")
    )
    return parser


def _live_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where the model runs (default: cpu)")
    command.add_argument(
        "--kernels",
        choices=KERNELS,
        help="what the model runs on: float kernels, integer sums, or packed words (default: float; on a GPU integer, "
        "if all activations are quantised)",
    )


def _train_command(train: argparse.ArgumentParser) -> None:
    """The options of `train`; their names and defaults are those of RecipeOptions."""
    train.add_argument("recipe", choices=list(RECIPES), help="which recipe")
    train.add_argument("--out", type=Path, required=True, help="folder for the artifact, and checkpoints until then")
    train.add_argument("--replace", action="store_true", help="train again although the artifact is there")
    train.add_argument("--data", type=Path, help="folder with the data set, for recipes that need one (default: data)")
    train.add_argument(
        "--holdout",
        action="store_true",
        help="evaluate on images held out of the training set, not on the test set: for choices",
    )
    train.add_argument("--results", type=Path, help="JSON file to which a row with the outcome is added")
    train.add_argument(
        "--history",
        type=Path,
        help="JSON file for the course of the run, with each width's accuracy after each epoch on the images that the "
        "outcome is measured on: for figures; choices are never made on it",
    )
    train.add_argument("--seed", type=seed, help="seed of the start and of the data order (default: %(default)s)")
    train.add_argument("--epochs", type=positive, help="epochs of each stage (default: the recipe's)")
    train.add_argument(
        "--float-epochs",
        type=positive,
        help="epochs of the float stage (default: as many as --epochs; for the teacher of a mixed stage, 90)",
    )

    scales = train.add_argument_group("quantisation")
    scales.add_argument("--bits", type=bit_list, dest="bit_choices", metavar="8,6,4,2", help="widths, descending")
    scales.add_argument(
        "--scheme", type=weight_scheme, help=f"weight scheme: {', '.join(SCHEMES)} (default: %(default)s)"
    )
    scales.add_argument("--ties", choices=TIE_RULES, help="tie rule of the second rounding (default: %(default)s)")
    scales.add_argument("--per-tensor", action="store_false", dest="per_channel", help="one weight scale per layer")
    scales.add_argument("--start", choices=STARTS, help="how scales start (default: %(default)s)")
    scales.add_argument(
        "--scale-gradient",
        choices=SCALE_GRADIENTS,
        help="gradient of the shared weight scale: exact, or as the paper prints it (default: %(default)s)",
    )

    joint = train.add_argument_group("the joint stage")
    joint.add_argument("--lr", type=float, help="learning rate (default: the recipe's)")
    joint.add_argument("--batch", type=positive, help="samples in a step (default: the recipe's)")
    joint.add_argument(
        "--recalibrate",
        type=positive,
        metavar="N",
        help="estimate norm statistics anew at the end, from N training batches at each width and searched plan "
        "(default: they stay)",
    )
    joint.add_argument(
        "--cutout", type=positive, metavar="PIXELS", help="blank a square of this side in each image (default: none)"
    )
    joint.add_argument("--weight-decay", type=float, help="of weights; scales have none (default: %(default)s)")
    joint.add_argument("--optimizer", choices=OPTIMIZERS, help="of weights; scales have Adam (default: %(default)s)")
    joint.add_argument(
        "--update",
        choices=UPDATES,
        help="after each width, or one for all, which needs --alrs off (default: %(default)s)",
    )
    joint.add_argument("--alrs", choices=READINGS, help="learning-rate scaling of the scales (default: %(default)s)")
    joint.add_argument("--freeze-scales", action="store_false", dest="learn_scales", help="keep scales at their start")
    joint.add_argument("--scale-lr", type=float, help="learning rate of the scales before ALRS (default: that of --lr)")
    joint.add_argument(
        "--scale-state", choices=SCALE_STATES, help="the optimizer's state of a shared scale (default: %(default)s)"
    )
    joint.add_argument("--distill", choices=DISTILLATIONS, help="knowledge distillation (default: %(default)s)")
    joint.add_argument(
        "--teacher",
        choices=TEACHERS,
        help="with --distill teacher or cascade (default: the float model that the run starts from)",
    )
    joint.add_argument("--teacher-seed", type=seed, help="of a --teacher that several runs share (default: --seed)")
    joint.add_argument("--distill-weight", type=float, help="share of the soft loss (default: %(default)s)")
    joint.add_argument("--temperature", type=float, help="of both sides of the soft loss (default: %(default)s)")

    mixed = train.add_argument_group("the mixed-precision stage (recipes that end in -mixed)")
    mixed.add_argument("--start-from", type=Path, metavar="FILE", help="what the recipe without -mixed wrote")
    mixed.add_argument("--sampling", choices=SAMPLINGS, help="how layers are drawn anew (default: %(default)s)")
    mixed.add_argument("--sigma", type=float, help="the share of layers drawn anew at the end (default: %(default)s)")
    mixed.add_argument("--sigma-warmup", type=positive, help="epochs without any at first (default: %(default)s)")
    mixed.add_argument(
        "--transitions",
        choices=NORM_FORMS,
        help="what norms have for each pair of widths: all, statistics or nothing (default: %(default)s)",
    )
    defaults = {f.name: f.default for f in dataclasses.fields(RecipeOptions) if f.default is not dataclasses.MISSING}
    train.set_defaults(run=_train, **defaults)


# --- commands -------------------------------------------------------------------------------------


def _demo(options: argparse.Namespace) -> None:
    from bitdial.demos.uniform import run_demo

    if options.mixed:
        _mixed_demo(options)
        return
    print("Training a small residual network on handwritten digits: float first, then 8, 6, 4 and 2 bits jointly.")
    began = time.monotonic()
    outcome = run_demo(options.out)
    result = outcome.result
    size = result["bytes"]
    rows = [["float", f"{100 * result['float_top1']:.1f} %", "", f"{size['float']:,}", "", ""]]
    for bits, top1 in result["top1"].items():
        rows.append(
            [
                f"{bits} bits",
                f"{100 * top1:.1f} %",
                f"{100 * (top1 - result['float_top1']):+.1f}",
                f"{size['separate'][bits]:,}",
                "identical" if outcome.identical_logits[int(bits)] else "DIFFERENT",
                f"{100 * outcome.exact_agreement[int(bits)]:.1f} %",
            ]
        )
    show_table(
        "One training, one file",
        ["setting", "accuracy", "to float", "bytes if alone", "reloaded logits", "code-exact argmax"],
        rows,
    )
    separate = sum(size["separate"].values())
    print(
        f"One file for all widths: {size['artifact']:,} bytes. Separate files: {separate:,} bytes together "
        f"({separate / size['artifact']:.1f}x). Float: {size['float']:,} bytes."
    )
    print(
        f"Saved {options.out / result['artifact']}, reloaded it and switched it live, in "
        f"{time.monotonic() - began:.0f} s. Figures: {outcome.page}"
    )


def _mixed_demo(options: argparse.Namespace) -> None:
    from bitdial.demos.mixed import LABELS, run_mixed_demo

    began = time.monotonic()
    outcome = run_mixed_demo(options.out, tell=print)
    result = outcome.result
    rows = [
        [
            name,
            percent(plan["held_out"]),
            percent(plan["test"]),
            number(plan["average_bits"]),
            number(plan["bytes"]),
            number(plan["bitops"]),
        ]
        for name, plan in result["plans"].items()
    ]
    for one in outcome.front.uniform:
        bits = bits_text(next(iter(one.plan.values())))
        top1 = percent(result["top1"]["hasb"][bits])
        costs = [number(one.costs[quantity]) for quantity in ("average_bits", "bytes", "bitops")]
        rows.append([f"{bits} bits everywhere", percent(one.accuracy), top1, *costs])
    columns = ["setting", "held-out accuracy", "test accuracy", "average bits", "bytes if alone", "BitOps"]
    show_table("One file, a plan for each budget", columns, rows)
    show_correlation(outcome.front)
    means = ", ".join(f"{LABELS[name]} {percent(value)}" for name, value in result["mean_held_out"].items())
    print(f"Best held-out accuracy, averaged over budgets from 2 to 4 bits: {means}")
    print(
        f"Saved {outcome.artifact} ({result['bytes']:,} bytes), reloaded it and switched it live to "
        f"{len(outcome.front.plans)} stored plans by name, with the trained model's logits at each, in "
        f"{time.monotonic() - began:.0f} s. Page: {outcome.page}"
    )


def _train(options: argparse.Namespace) -> None:
    given = {f.name: getattr(options, f.name) for f in dataclasses.fields(RecipeOptions)}
    outcome = RECIPES[options.recipe](RecipeOptions(**given))
    rows = [["float", f"{100 * outcome.float_top1:.2f} %"]]
    rows += [[f"{bits} bits", f"{100 * top1:.2f} %"] for bits, top1 in outcome.top1.items()]
    show_table(options.recipe, ["setting", "accuracy"], rows)
    print(f"Saved {outcome.artifact}")


def _eval(options: argparse.Namespace) -> None:
    artifact = read_artifact(options.file)
    settings = [(setting, resolve_setting(setting, artifact)) for setting in options.bits or artifact.bit_choices]
    live = load(artifact, device=options.device, kernels=options.kernels)
    data = test_data(options.data, artifact)
    rows = []
    for setting, bits in settings:
        set_bits(live, bits)
        rows.append([setting_label(setting), f"{100 * accuracy_on(live, data, options.device):.2f} %"])
    show_table(str(options.file), ["setting", "accuracy"], rows)


def _switch(options: argparse.Namespace) -> None:
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
        print(f"Accuracy there: {100 * accuracy_on(live, test_data(options.data, artifact), options.device):.2f} %")


def _inspect(options: argparse.Namespace) -> None:
    artifact = read_artifact(options.file)
    size = sizes(artifact)
    narrows = scheme_of(artifact.scheme).narrows
    if options.json:
        facts = {
            "file": str(options.file),
            "digest": artifact.digest,
            "narrows": narrows,
            "sizes": {**size, "separate": {str(b): v for b, v in size["separate"].items()}},
            **artifact.manifest,
        }
        print(json.dumps(facts, indent=2))
        return
    manifest = artifact.manifest
    architecture = manifest["architecture"]
    facts_rows = [
        ["scheme", f"{artifact.scheme}, ties {manifest['ties']}"],
        ["widths", ", ".join(map(str, artifact.bit_choices))],
        [
            "stored",
            f"{artifact.bit_choices[0]}-bit integer codes"
            if narrows
            else "float weights: this scheme cannot be narrowed from integers",
        ],
        ["architecture", _describe(architecture) if architecture else "the user's own: pass a model to load"],
        [
            "file",
            f"{size['file']:,} bytes (codes {size['codes']:,}, scales {size['scales']:,}, norms "
            f"{size['norms']:,}, float layers {size['float']:,})",
        ],
        ["norms", _describe_norms(size)],
        ["plans", ", ".join(artifact.plans) or "none"],
        ["sensitivity", f"on {found.images:,} images" if (found := artifact.sensitivity) else "none"],
        ["written by", f"{manifest['written_by']}, format version {manifest['version']}"],
        ["digest", f"{artifact.digest} (checked)"],
    ]
    show_table(str(options.file), ["", ""], facts_rows)
    metrics = artifact.metrics.get("top1")
    top1 = metrics if isinstance(metrics, dict) else {}
    rows = [
        [f"{bits} bits", f"{size['separate'][bits]:,}", percent(top1.get(str(bits)))] for bits in artifact.bit_choices
    ]
    show_table("By width", ["width", "bytes if alone", "stored accuracy"], rows)
    layers = [
        [name, entry["type"], "x".join(map(str, entry["shape"])), entry["activations"], entry.get("tied_to", "")]
        for name, entry in artifact.layers.items()
    ]
    show_table("Layers", ["layer", "type", "weight", "activations", "tied to"], layers)
    if artifact.report is not None:
        print(f"\nWhat prepare made of the model\n{artifact.report}")


def _describe_norms(size: dict[str, Any]) -> str:
    """What the norms cost against the weights, as they are and with transitions (see add_transitions)."""
    forms = size["norms_by_transitions"]
    if not size["norms"]:
        return "none with a set per width"
    shares = {name: f"{100 * value / size['codes']:.1f} %" for name, value in forms.items()}
    return (
        f"{100 * size['norms'] / size['codes']:.1f} % of the codes' bytes; without transitions {shares['none']}, with "
        f"those of statistics {shares['statistics']}, with full ones {shares['full']}"
    )


def _describe(architecture: dict[str, Any]) -> str:
    arguments = ", ".join(f"{k}={v}" for k, v in architecture.get("arguments", {}).items())
    return f"{architecture.get('name')}({arguments})"
