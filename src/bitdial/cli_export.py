"""The command `bitdial export`."""

import argparse
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from bitdial.artifact import Artifact, read_artifact
from bitdial.errors import ConfigError, PlanError
from bitdial.export import export_onnx
from bitdial.export.to_onnx import OPSETS
from bitdial.plan import BitPlan, LayerBits
from bitdial.recipes import TEST_DATA
from bitdial.runtime import load

TYPES = {"float32": torch.float32, "int64": torch.int64}


def export_command(parser: argparse.ArgumentParser, *, setting: Callable[[str], LayerBits | str]) -> None:
    """Give `parser` the options of `export`; `setting` reads a width, a pair or a name."""
    parser.add_argument("file", type=Path, help="an artifact (.safetensors) of a model that bitdial ships")
    parser.add_argument("--onnx", type=Path, required=True, metavar="OUT", help="the file to write")
    parser.add_argument(
        "--bits",
        type=setting,
        metavar="B",
        help="width (4), pair (4:8), stored plan, or a .json file with a plan (default: the highest width)",
    )
    parser.add_argument(
        "--shape",
        type=_shape,
        metavar="3x32x32",
        help="shape of one sample (default: that of the recipe's images that made the file)",
    )
    parser.add_argument("--dtype", choices=list(TYPES), default="float32", help="of the samples (default: %(default)s)")
    parser.add_argument(
        "--opset",
        type=int,
        choices=OPSETS,
        help="21 stores 2-bit weights as INT4 (default: 25 where a layer has 2 bits, else 21)",
    )
    parser.set_defaults(run=_export)


def _shape(text: str) -> tuple[int, ...]:
    sizes = tuple(int(part) for part in text.split("x"))
    if min(sizes) < 1:
        raise argparse.ArgumentTypeError("sizes must be at least 1")
    return sizes


def _export(options: argparse.Namespace) -> None:
    artifact = read_artifact(options.file)
    sample = _sample(options, artifact)
    done = export_onnx(load(artifact), options.onnx, sample, bits=_plan(options.bits), opset=options.opset)
    kinds = Counter(done.weights.values())
    parts = [f"{count} x {bits} bits as INT{container}" for (bits, container), count in sorted(kinds.items())]
    print(f"Saved {done.path}: {done.bytes:,} bytes, opset {done.opset}; layers: {', '.join(parts)}")


def _sample(options: argparse.Namespace, artifact: Artifact) -> Tensor:
    recipe = artifact.metrics.get("recipe")
    if options.shape:
        return torch.zeros(1, *options.shape, dtype=TYPES[options.dtype])
    if recipe in TEST_DATA:
        return TEST_DATA[recipe]()[0][0][:1]
    raise ConfigError("the file does not say what its inputs look like; pass --shape, such as --shape 3x32x32")


def _plan(setting: LayerBits | str | None) -> LayerBits | BitPlan | str | None:
    """A .json file as the plan that it holds; other settings as they are."""
    if not isinstance(setting, str) or not setting.endswith(".json"):
        return setting
    try:
        return BitPlan.from_dict(json.loads(Path(setting).read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError) as problem:
        raise PlanError(f"--bits {setting}: not a plan, as json.dumps(plan.to_dict()) gives ({problem})") from problem
