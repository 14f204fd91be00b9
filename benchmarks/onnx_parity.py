"""What onnxruntime makes of exported files: sizes, and how far outputs lie from the live model's, by session options.

    python benchmarks/onnx_parity.py       # a table, and results/onnx-cpu.json; ten minutes

The demo's network is trained (recipe `digits`) and run on its 500 test images. The others have random weights and norm
statistics of random inputs; the transformer's layers are weight-only. `difference` is the largest between outputs, in
shares of the largest output; `same_class` the share of samples with the same largest logit. `ours` are the options of
`onnx_session_options`, `default` onnxruntime's own.

A value on the border between two codes may fall on either side when a float sum is taken in another order, and random
networks amplify that. `code_exact` is the yardstick: how far our own evaluation in integer sums lies from the live
model. A file that differs about as much differs by borders only; the tests show it code by code.
"""

import argparse
import importlib.metadata
import json
import platform
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from timing import command
from torch import Tensor, nn

from bitdial import (
    BitPlan,
    QuantConfig,
    build_model,
    code_exact,
    export_onnx,
    get_bits,
    load,
    onnx_session_options,
    prepare,
    recalibrate_norms,
    save,
    set_bits,
)
from bitdial.recipes import RECIPES, RecipeOptions

BIT_CHOICES = (8, 6, 4, 3, 2)
CODES = {onnx.TensorProto.INT8: 8, onnx.TensorProto.INT4: 4, onnx.TensorProto.INT2: 2}
ROOT = Path(__file__).resolve().parent.parent


def demo(folder: Path) -> tuple[nn.Module, Tensor]:
    """The demo's network, trained, and its test images."""
    options = RecipeOptions(out=folder, bit_choices=BIT_CHOICES, progress=False)
    outcome = RECIPES["digits"](options)
    return load(outcome.artifact), torch.cat([images for images, _ in outcome.test])


def untrained(name: str, inputs: Tensor, folder: Path, **config: Any) -> tuple[nn.Module, Tensor]:
    """A ready-made model with random weights, its norms fitted to the inputs at each width, and the inputs."""
    model = prepare(build_model(name), QuantConfig(bit_choices=BIT_CHOICES, start="3std", **config), inputs)
    if any(isinstance(module, nn.BatchNorm2d) for module in model.modules()):
        for bits in BIT_CHOICES:
            recalibrate_norms(model, [inputs], bits)
    save(model.eval(), folder / f"{name}.safetensors")
    return load(folder / f"{name}.safetensors"), inputs


def mixed(live: nn.Module) -> BitPlan:
    """A plan that has every width."""
    return BitPlan({name: BIT_CHOICES[i % len(BIT_CHOICES)] for i, name in enumerate(get_bits(live))})


def measure(live: nn.Module, inputs: Tensor, path: Path) -> dict[str, Any]:
    """Export the live model at its setting and compare."""
    done = export_onnx(live, path, inputs[:1])
    codes = [t for t in onnx.load(path).graph.initializer if t.data_type in CODES and t.dims]
    with torch.no_grad():
        expected, exact = live(inputs).numpy(), code_exact(live)(inputs).numpy()
    row: dict[str, Any] = {
        "opset": done.opset,
        "file_bytes": done.bytes,
        "weight_bytes": sum(len(t.raw_data) for t in codes),
        "weights": sum(int(np.prod(t.dims)) for t in codes),
        "code_exact": compare(exact, expected),
    }
    for name, options in (("ours", onnx_session_options()), ("default", onnxruntime.SessionOptions())):
        options.log_severity_level = 4
        options.intra_op_num_threads = torch.get_num_threads()
        try:
            session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
            found = session.run(None, {session.get_inputs()[0].name: inputs.numpy()})[0]
        except Exception as problem:  # onnxruntime has no common class
            row[name] = {"error": str(problem).splitlines()[0][:200]}
            continue
        row[name] = compare(found, expected)
    return row


def compare(found: np.ndarray, expected: np.ndarray) -> dict[str, float]:
    """How far two sets of logits are apart."""
    return {
        "difference": float(f"{np.abs(found - expected).max() / np.abs(expected).max():.2g}"),
        "same_class": float((found.argmax(1) == expected.argmax(1)).mean()),
    }


def main() -> None:
    """Measure, print a table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "onnx-cpu.json")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        networks = {
            "demo": lambda: demo(folder),
            "resnet20": lambda: untrained("resnet20", torch.randn(32, 3, 32, 32), folder),
            "resnet18": lambda: untrained("resnet18", torch.randn(16, 3, 64, 64), folder),
            "tiny_transformer": lambda: untrained(
                "tiny_transformer", torch.randint(0, 256, (64, 32)), folder, activations="float"
            ),
        }
        for model, make in networks.items():
            live, inputs = make()
            for setting in (*BIT_CHOICES, mixed(live)):
                set_bits(live, setting)
                row = measure(live, inputs, folder / "model.onnx")
                label = f"{setting} bits" if isinstance(setting, int) else "mixed"
                rows.append({"model": model, "setting": label, "samples": len(inputs), **row})
                print(f"{model:17} {label:7} {row['weight_bytes']:11,} of {row['file_bytes']:11,} bytes  "
                      f"ours {row['ours']} default {row['default']} exact {row['code_exact']}", flush=True)  # fmt: skip
    record = {
        "command": command("onnx_parity"),
        "seed": options.seed,
        "bit_choices": list(BIT_CHOICES),
        "device": f"CPU, {torch.get_num_threads()} thread(s), {platform.machine()}",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            **{name: importlib.metadata.version(name) for name in ("onnx", "onnxscript", "onnxruntime")},
        },
        "rows": rows,
    }
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
