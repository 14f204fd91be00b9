"""The command `bitdial export`."""

import argparse
from collections import Counter
from pathlib import Path

import torch

from bitdial.artifact import read_artifact
from bitdial.cli.arguments import bits_setting, file_argument, shape
from bitdial.cli.data import sample_input
from bitdial.container import read_json
from bitdial.errors import PlanError
from bitdial.export import export_onnx
from bitdial.export.to_onnx import OPSETS
from bitdial.plan import BitPlan, LayerBits
from bitdial.runtime import load

TYPES = {"float32": torch.float32, "int64": torch.int64}


def export_command(parser: argparse.ArgumentParser) -> None:
    """The options of `export`."""
    file_argument(parser)
    parser.add_argument("--onnx", type=Path, required=True, metavar="OUT", help="the file to write")
    parser.add_argument(
        "--bits",
        type=bits_setting,
        metavar="B",
        help="width (4), pair (4:8), stored plan, or a .json file with a plan (default: the highest width)",
    )
    parser.add_argument(
        "--input", type=shape, metavar="3x32x32", help="shape of one input (default: that of the file's recipe)"
    )
    parser.add_argument("--dtype", choices=list(TYPES), default="float32", help="of the inputs (default: %(default)s)")
    parser.add_argument(
        "--opset",
        type=int,
        choices=OPSETS,
        help="21 stores 2-bit weights as INT4 (default: 25 where a layer has 2 bits, else 21)",
    )
    parser.set_defaults(run=_export)


def _export(options: argparse.Namespace) -> None:
    artifact = read_artifact(options.file)
    sample = sample_input(options.input, artifact).to(TYPES[options.dtype])
    done = export_onnx(load(artifact), options.onnx, sample, bits=_plan(options.bits), opset=options.opset)
    kinds = Counter(done.weights.values())
    parts = [f"{count} x {bits} bits as INT{container}" for (bits, container), count in sorted(kinds.items())]
    print(f"Saved {done.path}: {done.bytes:,} bytes, opset {done.opset}; layers: {', '.join(parts)}")


def _plan(setting: LayerBits | str | None) -> LayerBits | BitPlan | str | None:
    """A .json file as the plan that it holds; other settings as they are."""
    if not isinstance(setting, str) or not setting.endswith(".json"):
        return setting
    try:
        return BitPlan.from_dict(read_json(setting))
    except PlanError as problem:
        raise PlanError(f"--bits {setting}: not a plan, as json.dumps(plan.to_dict()) gives ({problem})") from problem
