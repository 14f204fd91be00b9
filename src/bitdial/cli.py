"""The command line. The only file that prints, parses arguments or exits."""

import argparse
import dataclasses
import json
import logging
import shlex
import statistics
import sys
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bitdial.artifact import Artifact, read_artifact, sizes
from bitdial.cli_export import export_command
from bitdial.config import SCALE_GRADIENTS, STARTS, check_bit_choices
from bitdial.errors import BitdialError, ConfigError, MissingDependencyError
from bitdial.functional import SCHEMES, TIE_RULES, scheme_of
from bitdial.hessian import hessian_trace
from bitdial.plan import BitPlan, LayerBits, set_bits
from bitdial.recipes import RECIPES, TEACHERS, TEST_DATA, RecipeOptions
from bitdial.recipes.cifar10 import cifar10_data
from bitdial.recipes.digits import digits_data
from bitdial.runtime import load, load_trainable
from bitdial.train import accuracy, batched
from bitdial.train.alrs import READINGS
from bitdial.train.config import DISTILLATIONS, SCALE_STATES, UPDATES

TestData = list[tuple[Tensor, Tensor]]


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
    demo.set_defaults(run=_demo)

    _train_command(commands.add_parser("train", help="run a training recipe; run it again to resume"))

    evaluate = commands.add_parser("eval", help="accuracy of an artifact at each width")
    _file_argument(evaluate)
    evaluate.add_argument(
        "--bits",
        type=_setting,
        action="append",
        metavar="B",
        help="width (4), pair (4:8) or stored plan; repeat for several (default: every width)",
    )
    _data_argument(evaluate)
    evaluate.set_defaults(run=_eval)

    inspect = commands.add_parser("inspect", help="what an artifact holds, checked against its digest")
    _file_argument(inspect)
    inspect.add_argument("--json", action="store_true", help="print JSON instead of tables")
    inspect.set_defaults(run=_inspect)

    switch = commands.add_parser("switch", help="switch an artifact while it is live; time it and evaluate there")
    _file_argument(switch)
    switch.add_argument(
        "--bits", type=_setting, required=True, metavar="B", help="width (4), pair (4:8) or stored plan"
    )
    _data_argument(switch)
    switch.set_defaults(run=_switch)

    export_command(commands.add_parser("export", help="an ONNX file of an artifact at one setting"), setting=_setting)
    _sensitivity_command(commands.add_parser("sensitivity", help="Hessian trace of each layer: which ones need bits"))
    return parser


def _train_command(train: argparse.ArgumentParser) -> None:
    """The options of `train`; their names and defaults are those of RecipeOptions."""
    train.add_argument("recipe", choices=list(RECIPES), help="which recipe")
    train.add_argument("--out", type=Path, required=True, help="folder for checkpoints and the artifact")
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
    train.add_argument("--seed", type=_seed, help="seed of the start and of the data order (default: %(default)s)")
    train.add_argument("--epochs", type=_positive, help="epochs of each stage (default: the recipe's)")
    train.add_argument(
        "--float-epochs", type=_positive, help="epochs of the float stage (default: as many as --epochs)"
    )

    scales = train.add_argument_group("quantisation")
    scales.add_argument("--bits", type=_bit_list, dest="bit_choices", metavar="8,6,4,2", help="widths, descending")
    scales.add_argument("--scheme", choices=list(SCHEMES), help="weight scheme (default: %(default)s)")
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
    joint.add_argument("--batch", type=_positive, help="samples in a step (default: the recipe's)")
    joint.add_argument(
        "--recalibrate",
        type=_positive,
        metavar="N",
        help="estimate norm statistics anew from N training batches at each width, at the end (default: they stay)",
    )
    joint.add_argument("--weight-decay", type=float, help="of weights; scales have none (default: %(default)s)")
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
        "--teacher", choices=TEACHERS, help="with --distill teacher (default: the float model that the run starts from)"
    )
    joint.add_argument("--distill-weight", type=float, help="share of the soft loss (default: %(default)s)")
    joint.add_argument("--temperature", type=float, help="of both sides of the soft loss (default: %(default)s)")
    defaults = {f.name: f.default for f in dataclasses.fields(RecipeOptions) if f.default is not dataclasses.MISSING}
    train.set_defaults(run=_train, **defaults)


def _sensitivity_command(sensitivity: argparse.ArgumentParser) -> None:
    _file_argument(sensitivity)
    sensitivity.add_argument(
        "--data",
        metavar="DATA",
        help="training data: digits, the folder with CIFAR-10, or an .npz with arrays x and y "
        "(default: the recipe's that made the file)",
    )
    sensitivity.add_argument(
        "--images", type=_positive, default=1000, help="how many, at random (default: %(default)s)"
    )
    sensitivity.add_argument(
        "--tolerance",
        type=float,
        default=0.1,
        help="a layer is done when its standard error is this share of its trace (default: %(default)s)",
    )
    sensitivity.add_argument(
        "--most-samples", type=_positive, default=200, help="random vectors for a layer at most (default: %(default)s)"
    )
    sensitivity.add_argument("--seed", type=_seed, default=0, help="of images and vectors (default: %(default)s)")
    sensitivity.add_argument("--out", type=Path, help="JSON file for the result")
    sensitivity.set_defaults(run=_sensitivity)


def _file_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="an artifact (.safetensors)")


def _data_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data",
        metavar="DATA",
        help="a recipe's test set, or an .npz with arrays x and y "
        "(default: the test set of the recipe that made the file)",
    )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _seed(text: str) -> int:
    value = int(text)
    if not 0 <= value < 1 << 31:
        raise argparse.ArgumentTypeError("must lie between 0 and 2147483647")
    return value


def _bit_list(text: str) -> tuple[int, ...]:
    try:
        return check_bit_choices(tuple(int(part) for part in text.split(",")))
    except (ValueError, ConfigError) as problem:
        raise argparse.ArgumentTypeError(str(problem)) from problem


def _setting(text: str) -> LayerBits | str:
    parts = text.split(":")
    if len(parts) <= 2 and all(part.isdigit() for part in parts):
        return int(text) if len(parts) == 1 else (int(parts[0]), int(parts[1]))
    return text


# --- commands -------------------------------------------------------------------------------------


def _demo(options: argparse.Namespace) -> None:
    from bitdial.demo import run_demo

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
    _table(
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


def _train(options: argparse.Namespace) -> None:
    given = {f.name: getattr(options, f.name) for f in dataclasses.fields(RecipeOptions)}
    outcome = RECIPES[options.recipe](RecipeOptions(**given))
    rows = [["float", f"{100 * outcome.float_top1:.2f} %"]]
    rows += [[f"{bits} bits", f"{100 * top1:.2f} %"] for bits, top1 in outcome.top1.items()]
    _table(options.recipe, ["setting", "accuracy"], rows)
    print(f"Saved {outcome.artifact}")


def _eval(options: argparse.Namespace) -> None:
    artifact = read_artifact(options.file)
    live, data = load(artifact), _test_data(options.data, artifact)
    rows = []
    for setting in options.bits or artifact.bit_choices:
        set_bits(live, _resolve(setting, artifact))
        rows.append([_label(setting), f"{100 * _accuracy(live, data):.2f} %"])
    _table(str(options.file), ["setting", "accuracy"], rows)


def _switch(options: argparse.Namespace) -> None:
    artifact = read_artifact(options.file)
    live = load(artifact)
    target = _resolve(options.bits, artifact)
    rows = []
    for start in artifact.bit_choices:
        times = []
        for _ in range(20):
            set_bits(live, start)
            began = time.perf_counter()
            set_bits(live, target)
            times.append(1e3 * (time.perf_counter() - began))
        rows.append([f"{start} bits", _label(options.bits), f"{statistics.median(times):.2f} ms"])
    _table("Switching while live (median of 20)", ["from", "to", "time"], rows)
    if options.data or artifact.metrics.get("recipe") in TEST_DATA:
        print(f"Accuracy there: {100 * _accuracy(live, _test_data(options.data, artifact)):.2f} %")


def _sensitivity(options: argparse.Namespace) -> None:
    artifact = read_artifact(options.file)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator().manual_seed(options.seed)
    x, y = _training_data(options.data, artifact)
    chosen = torch.randperm(len(x), generator=generator)[: options.images]
    try:
        found = hessian_trace(
            load_trainable(artifact).to(device),
            batched(x[chosen].to(device), y[chosen].to(device)),
            tolerance=options.tolerance,
            most_samples=options.most_samples,
            generator=generator,
        )
    except (RuntimeError, IndexError) as problem:
        raise _does_not_fit(x, problem) from problem
    rows = [
        [name, f"{entry.parameters:,}", f"{entry.trace:.4g}", f"{entry.error:.2g}", f"{entry.normalized:.3g}"]
        for name, entry in found.layers.items()
    ]
    title = f"{options.file}: Hessian trace on {found.images} images"
    _table(title, ["layer", "weights", "trace", "standard error", "trace per weight"], rows)
    if options.out:
        found.save(options.out)
        print(f"Saved {options.out}")


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
        ["plans", ", ".join(artifact.plans) or "none"],
        ["written by", f"{manifest['written_by']}, format version {manifest['version']}"],
        ["digest", f"{artifact.digest} (checked)"],
    ]
    _table(str(options.file), ["", ""], facts_rows)
    metrics = artifact.metrics.get("top1")
    top1 = metrics if isinstance(metrics, dict) else {}
    rows = [
        [f"{bits} bits", f"{size['separate'][bits]:,}", _percent(top1.get(str(bits)))] for bits in artifact.bit_choices
    ]
    _table("By width", ["width", "bytes if alone", "stored accuracy"], rows)
    layers = [
        [name, entry["type"], "x".join(map(str, entry["shape"])), entry["activations"], entry.get("tied_to", "")]
        for name, entry in artifact.layers.items()
    ]
    _table("Layers", ["layer", "type", "weight", "activations", "tied to"], layers)


# --- helpers --------------------------------------------------------------------------------------


def _test_data(choice: str | None, artifact: Artifact) -> TestData:
    name = choice or artifact.metrics.get("recipe")
    if name in TEST_DATA:
        return TEST_DATA[name]()
    if choice is None:
        raise ConfigError(
            "the file does not say what it was trained on; pass --data with a recipe's name "
            f"({', '.join(TEST_DATA)}) or an .npz file with arrays x and y"
        )
    if not Path(choice).is_file():
        raise ConfigError(f"--data {choice}: neither a recipe ({', '.join(TEST_DATA)}) nor a file")
    return batched(*_npz_data(Path(choice)))


def _training_data(choice: str | None, artifact: Artifact) -> tuple[Tensor, Tensor]:
    """Images and labels that a model may be fitted to: sensitivities lead to choices, which no test image may make."""
    if (choice or artifact.metrics.get("recipe")) == "digits":
        return digits_data()[:2]
    if choice is None:
        raise ConfigError(
            "the file does not say where its training data is; pass --data with digits, the folder with CIFAR-10 or an "
            ".npz file with arrays x and y"
        )
    if Path(choice).is_dir():
        return cifar10_data(Path(choice), holdout=True, device=torch.device("cpu"))[0]
    if not Path(choice).is_file():
        raise ConfigError(f"--data {choice}: not digits, a folder or a file")
    return _npz_data(Path(choice))


def _npz_data(path: Path) -> tuple[Tensor, Tensor]:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            x, y = torch.from_numpy(arrays["x"]).float(), torch.from_numpy(arrays["y"]).long()
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as problem:
        raise ConfigError(f"--data {path}: not an .npz file with arrays x and y ({problem})") from problem
    if len(x) != len(y) or len(x) == 0:
        raise ConfigError(f"--data {path}: x has {len(x)} samples and y {len(y)}")
    return x, y


def _accuracy(live: nn.Module, data: TestData) -> float:
    try:
        return accuracy(live, data)
    except (RuntimeError, IndexError) as problem:
        raise _does_not_fit(data[0][0], problem) from problem


def _does_not_fit(x: Tensor, problem: Exception) -> ConfigError:
    return ConfigError(f"the data (samples of shape {tuple(x.shape[1:])}) does not fit the model: {problem}")


def _resolve(setting: LayerBits | str, artifact: Artifact) -> LayerBits | BitPlan:
    if not isinstance(setting, str):
        return setting
    if setting not in artifact.plans:
        raise ConfigError(
            f"--bits {setting}: not a width, a pair such as 4:8, or a stored plan "
            f"({', '.join(artifact.plans) or 'the file has none'})"
        )
    return artifact.plans[setting]


def _label(setting: LayerBits | str) -> str:
    if isinstance(setting, tuple):
        return f"w{setting[0]}a{setting[1]}"
    return f"{setting} bits" if isinstance(setting, int) else setting


def _describe(architecture: dict[str, Any]) -> str:
    arguments = ", ".join(f"{k}={v}" for k, v in architecture.get("arguments", {}).items())
    return f"{architecture.get('name')}({arguments})"


def _percent(value: object) -> str:
    return f"{100 * value:.2f} %" if isinstance(value, int | float) else ""


def _table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError as problem:
        raise MissingDependencyError.missing("cli", "rich") from problem
    table = Table(title=title, show_header=any(columns), title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 or not any(columns) else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console().print(table, markup=False)


if __name__ == "__main__":
    sys.exit(main())
