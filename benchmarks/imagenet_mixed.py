"""Bits by layer on ImageNet, at the bytes of a uniform width: plans found by measuring, by Hessian traces, at random.

    python benchmarks/imagenet_mixed.py model.safetensors --weights float.safetensors --images DIR --effort none

`model.safetensors` is an artifact of a model of `build_model`, `float.safetensors` its float weights as
tools/imagenet_weights.py writes them; their metadata says how images become inputs. DIR has the folders `calibration`
and `dev` with .jpg files, and labels.json: {"calibration" or "dev": {file: class}}.

Weights have one of the file's widths by layer, activations 8 bits. The budget is the bytes of --bits for all weights
but those of the first and last layer, which the file has at 8 bits; plans may give these others, too.
Searches see calibration images only: the measured one without labels, the Hessian traces with them. Each plan is then
tested on the dev images, against the uniform plan, by McNemar's exact test on the same images. A random plan is as
large as the budget allows. Rows go to results/imagenet-mixed.json; those of the same model, effort, method and seed are
replaced.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from plan_comparison import mcnemar, random_plan
from safetensors import safe_open
from safetensors.torch import load_file
from timing import command
from torch import Tensor, nn

from bitdial import (
    BitPlan,
    at_bits,
    batched,
    build_model,
    hessian_trace,
    load,
    load_trainable,
    measure_costs,
    measured_search,
    search,
)
from bitdial.files.atomic import read_json, write_json
from bitdial.planning.cost import Costs

ROOT = Path(__file__).resolve().parent.parent
METHODS = ("measured", "hessian", "random")
Row = dict[str, Any]


@dataclass(frozen=True)
class Images:
    """The images of a folder as a model takes them."""

    files: list[Path]
    labels: list[int]
    mean: Tensor
    std: Tensor

    @classmethod
    def of(cls, folder: Path, part: str, count: int | None, normalisation: dict[str, Any]) -> "Images":
        """The first `count` images of `part`, by name; all of them for None."""
        known = read_json(folder / "labels.json")[part]
        files = sorted((folder / part).glob("*.jpg"))[:count]
        if not files:
            raise SystemExit(f"{folder / part} has no .jpg files")
        if normalisation["order"] != "RGB":
            raise SystemExit(f"images in {normalisation['order']} are not known here")
        mean, std = (torch.tensor(normalisation[key]).view(3, 1, 1) for key in ("mean", "std"))
        return cls(files, [int(known[file.name]) for file in files], mean, std)

    def read(self, files: list[Path]) -> Tensor:
        """Some of them, (n, 3, height, width)."""
        pixels = [np.asarray(Image.open(file).convert("RGB")).copy() for file in files]
        images = torch.stack([torch.from_numpy(one).permute(2, 0, 1).float() for one in pixels])
        return (images - self.mean) / self.std

    def batches(self, size: int) -> list[Tensor]:
        """All of them, in memory."""
        return [self.read(self.files[at : at + size]) for at in range(0, len(self.files), size)]


@dataclass(frozen=True)
class Setting:
    """What all methods share."""

    options: argparse.Namespace
    costs: Costs
    budget: float
    float_model: nn.Module
    live: nn.Module
    calibration: Images


def float_model_of(path: Path) -> tuple[str, nn.Module, dict[str, Any]]:
    """The name of a model, the model with the weights of `path`, and how images become its inputs."""
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    model = build_model(metadata["model"], **json.loads(metadata["arguments"])).eval()
    model.load_state_dict(load_file(path))
    return metadata["model"], model, json.loads(metadata["images"])


def measured_plan(setting: Setting) -> tuple[BitPlan, Row]:
    """The plan that `measured_search` finds."""
    options = setting.options
    batches = [x.to(options.device) for x in setting.calibration.batches(options.batch)]
    found = measured_search(
        setting.live, batches, setting.costs, setting.budget, reference=setting.float_model,
        activation_bits=options.activation_bits, patience=options.patience, seconds=options.seconds,
        pinned=dict.fromkeys(setting.costs.fixed_bits),
    )  # fmt: skip
    kept = {key: value for key, value in found.to_dict().items() if key in ("samples", "measured", "stopped")}
    kept |= {"trajectory": [[one.plans, round(one.seconds, 1), one.distance, one.by] for one in found.trajectory]}
    return found.plan, {"kl": found.distance, "uniform_kl": found.uniform_distance, **kept}


def hessian_plan(setting: Setting) -> tuple[BitPlan, Row]:
    """The plan that `search` finds by Hessian traces."""
    options, images = setting.options, setting.calibration
    count = min(options.hessian_images, len(images.files))
    x, y = images.read(images.files[:count]), torch.tensor(images.labels[:count])
    model = load_trainable(options.file).to(options.device)
    batches = batched(x.to(options.device), y.to(options.device), options.batch)
    traces = hessian_trace(model, batches, most_samples=options.hessian_samples, generator=generator(options.seed))
    bits = options.activation_bits
    free = dict.fromkeys(setting.costs.fixed_bits)
    found = search(model, traces, setting.costs, {"bytes": setting.budget}, activation_bits=bits, pinned=free)
    return found.plan, {"samples": count, "vectors": options.hessian_samples}


def generator(seed: int) -> torch.Generator:
    """A generator of its own."""
    return torch.Generator().manual_seed(seed)


def right_ones(model: nn.Module, images: Images, batch: int, device: str) -> list[bool]:
    """Whether each image is classified right, in order; read batch by batch."""
    right: list[bool] = []
    with torch.no_grad():
        for at in range(0, len(images.files), batch):
            x = images.read(images.files[at : at + batch]).to(device)
            right += (model(x).argmax(1).cpu() == torch.tensor(images.labels[at : at + batch])).tolist()
    return right


def store(path: Path, rows: list[Row]) -> None:
    """Write rows, in place of those of the same model, effort, method and seed."""
    before = read_json(path) if path.exists() else []
    keys = ("model", "effort", "method", "seed")
    new = {tuple(row[key] for key in keys) for row in rows}
    write_json(path, [row for row in before if tuple(row.get(key) for key in keys) not in new] + rows)


def compare(setting: Setting, name: str, dev: Images) -> None:
    """Find plans by each method, test them, print and store rows."""
    options, live, costs = setting.options, setting.live, setting.costs

    def test(plan: BitPlan) -> list[bool]:
        with at_bits(live, plan):
            return right_ones(live, dev, options.batch, options.device)

    def percent(right: list[bool]) -> float:
        return round(100 * sum(right) / len(right), 3)

    own_width = (options.bits, options.activation_bits)
    uniform = test(BitPlan(default=own_width))
    float_top1 = percent(right_ones(setting.float_model, dev, options.batch, options.device))
    print(
        f"{name}: float {float_top1:.2f}, uniform {options.bits} bits {percent(uniform):.2f} on {len(uniform)} images"
    )
    searches: dict[str, Callable[[int], tuple[BitPlan, Row]]] = {
        "measured": lambda seed: measured_plan(setting),
        "hessian": lambda seed: hessian_plan(setting),
        "random": lambda seed: (
            random_plan(costs, "bytes", setting.budget, seed=seed, activation_bits=options.activation_bits),
            {},
        ),
    }
    for method in options.methods:
        for seed in range(options.seed, options.seed + (options.random if method == "random" else 1)):
            began = time.perf_counter()
            plan, more = searches[method](seed)
            seconds = time.perf_counter() - began
            right = test(plan)
            row = {
                "model": name, "effort": options.effort, "method": method, "seed": seed,
                "bytes": costs.of(plan)["bytes"], "uniform_bytes": setting.budget, "uniform_bits": options.bits,
                "activation_bits": options.activation_bits, "top1": percent(right), "uniform_top1": percent(uniform),
                "float_top1": float_top1, "p_value": mcnemar(right, uniform), "images": len(right),
                "seconds": round(seconds, 1), **more, "plan": {layer: bits[0] for layer, bits in plan.items()},
                "device": device_name(options.device), "torch": torch.__version__,
                "command": own_command(),
            }  # fmt: skip
            print(
                "{method:9} top1 {top1:6.2f}  p {p_value:.3g}  {bytes:,} bytes  {seconds} s".format(**row), flush=True
            )
            store(options.out, [row])


def device_name(device: str) -> str:
    """What the times are of."""
    return torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} thread(s)"


def own_command() -> str:
    """What repeats this run, without the folders of this machine."""
    words = command("imagenet_mixed").split(" ")
    return " ".join(Path(word).name if Path(word).is_absolute() else word for word in words)


def main() -> None:
    """Read the options, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="the artifact")
    parser.add_argument("--weights", type=Path, required=True, help="the float weights of its model")
    parser.add_argument("--images", type=Path, required=True, metavar="DIR", help="calibration/, dev/, labels.json")
    parser.add_argument("--effort", default="none", help="how the file was calibrated, for the row")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--bits", type=int, default=4, help="the uniform width whose bytes are the budget")
    parser.add_argument("--activation-bits", type=int, default=8)
    parser.add_argument("--samples", type=int, default=512, help="calibration images for the measured search")
    parser.add_argument("--seconds", type=float, help="time limit of the measured search")
    parser.add_argument("--patience", type=int, default=100)
    parser.add_argument("--hessian-images", type=int, default=128)
    parser.add_argument("--hessian-samples", type=int, default=16, help="random vectors for a layer at most")
    parser.add_argument("--random", type=int, default=20, help="how many random plans")
    parser.add_argument("--dev-images", type=int, help="how many, by name (default: all)")
    parser.add_argument("--batch", type=int, default=16, help="16 is fastest on a CPU")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "imagenet-mixed.json")
    options = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = False
    name, float_model, normalisation = float_model_of(options.weights)
    calibration = Images.of(options.images, "calibration", options.samples, normalisation)
    dev = Images.of(options.images, "dev", options.dev_images, normalisation)
    costs = measure_costs(load_trainable(options.file), calibration.read(calibration.files[:1]))
    budget = costs.of((options.bits, options.activation_bits))["bytes"]
    live = load(options.file, device=options.device, kernels="float")
    compare(Setting(options, costs, budget, float_model.to(options.device), live, calibration), name, dev)


if __name__ == "__main__":
    main()
