"""What joint training costs beside float training: time, and on a GPU memory, measured in one run.

    python benchmarks/train_step.py            # a table, and results/train-step-cpu.json (-h200, -cuda)

On the CPU: one joint step for all widths against as many float steps, with Adam in eager mode. On a GPU, these variants
in bf16 autocast, channels-last, with Adam:

    float          a float step in bitdial's engine: fused kernels, one CUDA graph
    joint          the joint step in the same engine
    eager          the same joint step by the plain reference: no Triton kernels, no graph
    float eager    a float step in plain PyTorch
    peer           a step at 4 bits with brevitas, which trains one width a model; `peers.py` says how to get it
    peer compiled  the same under torch.compile; only with --compile, since compiling takes minutes

With --process-group also the joint step as one process of a group, whose gradients, losses and norm statistics go
through its collectives (NCCL on a GPU, gloo on the CPU), beside the same step without a group: what they cost before
any byte leaves the device. `time_vs_alone` has the ratio.

Times are divided by the number of widths the step trains. The variants alternate, and each time is the median over the
rounds, so the ratios hold although the machine's speed may drift.

Memory is measured with no other variant around. `peak_mib` is the most that tensors took at once, parameters, optimizer
state and the recording of the graph included; `reserved_mib` is what the process then holds from step to step, which
for a recorded step is the graph's own pool.
"""

import argparse
import contextlib
import copy
import functools
import gc
import importlib.metadata
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from peers import GET_BREVITAS, brevitas_model, has_brevitas
from timing import command
from torch import Tensor, nn

from bitdial import JointStep, QuantConfig, TrainConfig, build_model, prepare
from bitdial.kernels import dispatch
from bitdial.kernels.cuda_graph import EAGER_STEPS, StepGraphs
from bitdial.train.gpu.fuse import FastModel
from bitdial.train.optimizers import make_optimizer

SHAPES = {"resnet20": (64, 3, 32), "resnet18": (8, 3, 112), "mobilenet_v2": (8, 3, 112)}
GPU_SHAPES = {"resnet20": (256, 3, 32), "resnet18": (64, 3, 224), "resnet50": (64, 3, 224)}
SMOKE_SHAPE = (2, 3, 32)
BIT_CHOICES = (8, 6, 4, 2)
PEER_BITS = 4
COMPILED = "peer compiled"
GROUPED = "joint in a group"
WARM_UP = EAGER_STEPS + 4  # some eager steps, the recording, some replays
MOST_STEPS, ROUND_MS = 20, 400  # steps a round, fewer where that would take longer
CIFAR10_STEPS = 196  # an epoch: 50,000 images in batches of 256
ROOT = Path(__file__).resolve().parent.parent

Step = Callable[[], object]


# --- the CPU half -------------------------------------------------------------------------------


def seconds(action: Callable[[], object]) -> float:
    """How long one call takes."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def measure(name: str, bit_choices: tuple[int, ...], rounds: int, seed: int) -> dict[str, object]:
    """One row: seconds of a float step and of a joint step of the model called `name`."""
    torch.manual_seed(seed)
    batch, channels, size = SHAPES[name]
    model = build_model(name)
    inputs, targets = torch.randn(batch, channels, size, size), torch.randint(0, 10, (batch,))
    joint = JointStep(prepare(model, QuantConfig(bit_choices=bit_choices), inputs), TrainConfig(), steps_per_epoch=1000)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model.train()

    def float_step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

    def joint_step() -> None:
        joint(inputs, targets)

    for warm_up in (float_step, joint_step):
        warm_up()
    times = [(seconds(float_step), seconds(joint_step)) for _ in range(rounds)]
    float_time, joint_time = (statistics.median(column) for column in zip(*times, strict=True))
    return {
        "model": name,
        "batch": list(inputs.shape),
        "bit_choices": list(bit_choices),
        "float_step_s": round(float_time, 4),
        "joint_step_s": round(joint_time, 4),
        "joint_vs_float_steps": round(joint_time / (len(bit_choices) * float_time), 3),
    }


def measure_cpu(models: list[str], rounds: int, seed: int) -> list[dict[str, object]]:
    """The rows of the CPU half, printed as they come."""
    rows = []
    for name in models:
        row = measure(name, BIT_CHOICES, rounds, seed)
        rows.append(row)
        print(
            f"{name:14} float step {row['float_step_s']:7.3f} s   joint step (4 widths) {row['joint_step_s']:7.3f} s   "
            f"against 4 float steps {row['joint_vs_float_steps']:.2f}x",
            flush=True,
        )
    return rows


# --- the GPU half: the variants -----------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """A network, in float and prepared, both kept on the CPU, and a batch on the device."""

    model: nn.Module
    prepared: nn.Module
    inputs: Tensor
    targets: Tensor

    @classmethod
    def make(cls, name: str, shape: tuple[int, int, int], device: str, seed: int) -> "Work":
        """The model called `name`, prepared on some images of a random batch of `shape` (images, channels, size)."""
        torch.manual_seed(seed)
        images, channels, size = shape
        inputs = torch.randn(images, channels, size, size).to(device, memory_format=torch.channels_last)
        targets = torch.randint(0, 10, (images,)).to(device)
        model = build_model(name).to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        prepared = prepare(model, QuantConfig(bit_choices=BIT_CHOICES), inputs[:16])
        return cls(model.cpu(), prepared.cpu(), inputs, targets)

    def placed(self, model: nn.Module) -> nn.Module:
        """A copy of `model` on the device, to train."""
        return copy.deepcopy(model).to(self.inputs.device).train()


def float_step(model: nn.Module, network: FastModel) -> Callable[[Tensor, Tensor], Tensor]:
    """A step of ordinary training of `model`'s parameters, with `network` in its place."""
    parameters, config = list(model.parameters()), TrainConfig()
    optimizer = make_optimizer(config.optimizer, parameters, lr=config.lr, weight_decay=config.weight_decay)

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        for parameter in parameters:
            parameter.grad = None
        with torch.autocast(inputs.device.type, torch.bfloat16):
            loss = F.cross_entropy(network(inputs), targets)
        network.backward(loss)
        optimizer.step()
        return loss.detach()

    return step


def build_float(work: Work) -> Step:
    """The float step in bitdial's engine; the CPU has no graphs, and fused layers fall back to the model's own."""
    model, graphs = work.placed(work.model), StepGraphs()
    step = float_step(model, FastModel(model, fused=True))
    if work.inputs.is_cuda:
        return lambda: graphs.run(step, work.inputs, work.targets)
    return lambda: step(work.inputs, work.targets)


def build_float_eager(work: Work) -> Step:
    """The float step in plain PyTorch."""
    model = work.placed(work.model)
    step = float_step(model, FastModel(model, fused=False))
    return lambda: step(work.inputs, work.targets)


def build_joint(work: Work) -> Step:
    """The joint step; on a GPU with all that makes it fast."""
    step = JointStep(work.placed(work.prepared), TrainConfig(autocast="bfloat16"), steps_per_epoch=1000)
    return lambda: step(work.inputs, work.targets)


def no() -> bool:
    """False: a plain function, since a Mock would take tens of microseconds a call, and eager steps ask often."""
    return False


@contextlib.contextmanager
def reference_only() -> Iterator[None]:
    """Within this, bitdial does without its Triton kernels."""
    with mock.patch.object(dispatch, "triton_installed", no):
        yield


def build_eager(work: Work) -> Step:
    """The joint step by the plain reference."""
    config = TrainConfig(autocast="bfloat16", cuda_graph=False, fused=False)
    with reference_only():
        joint = JointStep(work.placed(work.prepared), config, steps_per_epoch=1000)

    def step() -> None:
        with reference_only():
            joint(work.inputs, work.targets)

    return step


def build_peer(work: Work, *, compiled: bool = False) -> Step:
    """A step at one width with brevitas: eager, as it comes, or compiled."""
    model = brevitas_model(work.model, PEER_BITS, work.inputs)
    step = float_step(model, FastModel(torch.compile(model) if compiled else model, fused=False))
    return lambda: step(work.inputs, work.targets)


class Variant(NamedTuple):
    """How a variant's step is built, and the widths that it trains; none: float."""

    build: Callable[[Work], Step]
    bits: tuple[int, ...] = ()


VARIANTS = {
    "float": Variant(build_float),
    "joint": Variant(build_joint, BIT_CHOICES),
    "eager": Variant(build_eager, BIT_CHOICES),
    "float eager": Variant(build_float_eager),
    "peer": Variant(build_peer, (PEER_BITS,)),
    COMPILED: Variant(functools.partial(build_peer, compiled=True), (PEER_BITS,)),
}


# --- the GPU half: measuring --------------------------------------------------------------------


def free_memory() -> None:
    """Return to the GPU what no tensor and no graph holds, the matrix library's work space included."""
    gc.collect()
    if torch.cuda.is_available():
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def measure_memory(build: Callable[[Work], Step], work: Work) -> dict[str, float]:
    """Peak and lasting memory of a variant, alone on the GPU, in MiB; on the CPU nothing, but the step is tried."""
    free_memory()
    step = build(work)
    for _ in range(EAGER_STEPS):  # optimizers make their state, libraries try their kernels
        step()
    if not work.inputs.is_cuda:
        return {}
    free_memory()  # the eager steps before a recording run on streams of their own, each with a work space
    torch.cuda.reset_peak_memory_stats()
    for _ in range(WARM_UP - EAGER_STEPS):
        step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    reserved = torch.cuda.max_memory_reserved()
    return {"peak_mib": round(peak / 2**20, 1), "reserved_mib": round(reserved / 2**20, 1)}


def milliseconds(step: Step, count: int, *, on_gpu: bool) -> float:
    """How long one step takes, the mean over `count` in a row."""
    if not on_gpu:
        return 1000 * seconds(lambda: [step() for _ in range(count)]) / count
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(count):
        step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / count


@contextlib.contextmanager
def noting(row: dict[str, Any]) -> Iterator[None]:
    """Whatever goes wrong within this is noted in the row, and the other variants go on."""
    try:
        yield
    except Exception as problem:
        row["error"] = f"{type(problem).__name__}: {problem}"


def measure_model(name: str, work: Work, variants: list[str], rounds: int) -> list[dict[str, Any]]:
    """The rows of one network: each variant's memory alone, then the times of all that worked, side by side."""
    on_gpu = work.inputs.is_cuda
    rows: list[dict[str, Any]] = []
    for variant in variants:
        build, bits = VARIANTS[variant]
        rows.append({"model": name, "variant": variant, "batch": list(work.inputs.shape), "bits": list(bits)})
        row = rows[-1]
        with noting(row):
            row |= measure_memory(build, work)
    free_memory()
    steps: dict[str, Step] = {}
    times: dict[str, list[float]] = {variant: [] for variant in variants}
    for row in rows:
        if "error" not in row:
            with noting(row):
                step = VARIANTS[row["variant"]].build(work)
                for _ in range(WARM_UP if on_gpu else 1):
                    step()
                once = milliseconds(step, 2, on_gpu=on_gpu)
                row["steps_per_round"] = max(2, min(MOST_STEPS, int(ROUND_MS / once)))
                steps[row["variant"]] = step
    for _ in range(rounds):
        for row in rows:
            if "error" not in row:
                with noting(row):
                    taken = milliseconds(steps[row["variant"]], row["steps_per_round"], on_gpu=on_gpu)
                    times[row["variant"]].append(taken)
    for row in rows:
        if "error" not in row:
            row["ms_per_step"] = round(statistics.median(times[row["variant"]]), 4)
            row["ms_per_bitwidth"] = round(row["ms_per_step"] / max(1, len(row["bits"])), 4)
    add_ratios(rows)
    return rows


@contextlib.contextmanager
def process_group(backend: str) -> Iterator[None]:
    """A group of this process alone."""
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def measure_group(name: str, work: Work, rounds: int) -> dict[str, Any]:
    """The row of the joint step in a process group, timed side by side with a step that was made before there was one.

    On a GPU that one replays its graph, which knows of no group. The CPU has no graphs: there, in a trial, it exchanges
    losses and statistics too.
    """
    on_gpu = work.inputs.is_cuda
    row: dict[str, Any] = {"model": name, "variant": GROUPED, "batch": list(work.inputs.shape), "bits": [*BIT_CHOICES]}
    with noting(row):
        alone = build_joint(work)
        for _ in range(WARM_UP if on_gpu else 1):
            alone()
        with process_group("nccl" if on_gpu else "gloo"):
            grouped = build_joint(work)
            for _ in range(WARM_UP if on_gpu else 1):
                grouped()
            count = max(2, min(MOST_STEPS, int(ROUND_MS / milliseconds(grouped, 2, on_gpu=on_gpu))))
            times = [
                [milliseconds(step, count, on_gpu=on_gpu) for step in (alone, grouped)] for _ in range(max(rounds, 1))
            ]
            del grouped  # a recorded step must not outlive the group that it calls
            free_memory()
        without, within = (statistics.median(column) for column in zip(*times, strict=True))
        row |= {"steps_per_round": count, "ms_per_step": round(within, 4), "time_vs_alone": round(within / without, 3)}
        row["ms_per_bitwidth"] = round(within / len(BIT_CHOICES), 4)
    return row


def add_ratios(rows: list[dict[str, Any]]) -> None:
    """Set one network's rows in relation to its float step, in place; where that is missing, there is no ratio."""
    base = next((row for row in rows if row["variant"] == "float"), {})
    for row in rows:
        for ratio, key in (("time_vs_float", "ms_per_bitwidth"), ("memory_vs_float", "peak_mib")):
            if key in row and key in base:
                row[ratio] = round(row[key] / base[key], 3)


def derive(rows: list[dict[str, Any]]) -> dict[str, float]:
    """What the targets on ResNet20 ask for: speed over eager, seconds of an epoch of CIFAR-10."""
    times = {row["variant"]: row["ms_per_step"] for row in rows if row["model"] == "resnet20" and "ms_per_step" in row}
    found = {}
    if "joint" in times:
        found["resnet20_epoch_s"] = round(CIFAR10_STEPS * times["joint"] / 1000, 3)
        if "eager" in times:
            found["resnet20_eager_vs_joint"] = round(times["eager"] / times["joint"], 2)
    return found


def line(row: dict[str, Any]) -> str:
    """A row as a line of the printed table."""
    text = f"{row['model']:10} {row['variant']:14}"
    if "error" in row:
        return f"{text} {row['error'].splitlines()[0]}"
    text += f" {row['ms_per_bitwidth']:9.3f} ms a width"
    text += f" {row['time_vs_float']:6.2f}x" if "time_vs_float" in row else ""
    text += f" {row['time_vs_alone']:6.2f}x the time without" if "time_vs_alone" in row else ""
    text += f" {row['peak_mib']:9.0f} MiB" if "peak_mib" in row else ""
    return text + (f" {row['memory_vs_float']:6.2f}x" if "memory_vs_float" in row else "")


def measure_gpu(models: list[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of the GPU half, printed as they come."""
    variants = options.variants + [COMPILED] * options.compile
    if not has_brevitas():
        variants = [variant for variant in variants if not variant.startswith("peer")]
        print(f"No peer: {GET_BREVITAS}", flush=True)
    rows = []
    with torch.backends.cudnn.flags(enabled=True, benchmark=True):  # as the recipes have it
        for name in models:
            shape = SMOKE_SHAPE if options.smoke else GPU_SHAPES[name]
            work = Work.make(name, shape, options.device, options.seed)
            found = measure_model(name, work, variants, options.rounds)
            if options.process_group:
                found.append(measure_group(name, work, options.rounds))
            print("\n".join(map(line, found)), flush=True)
            rows += found
    return rows


# --- the script ---------------------------------------------------------------------------------


def default_out(device_name: str) -> Path:
    """Where the results of this device go."""
    kind = "h200" if "H200" in device_name else "cpu" if device_name.startswith("CPU") else "cuda"
    return ROOT / "results" / f"train-step-{kind}.json"


def versions(gpu_half: bool) -> dict[str, str]:
    """The software that the numbers depend on."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("triton", "brevitas") if gpu_half else ():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def main() -> None:
    """Measure, print a table, write the results."""
    plain = [variant for variant in VARIANTS if variant != COMPILED]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", nargs="+", choices=sorted(SHAPES | GPU_SHAPES))
    parser.add_argument("--variants", nargs="+", choices=plain, default=plain, help="of the GPU half")
    parser.add_argument("--compile", action="store_true", help="measure the peer under torch.compile too")
    parser.add_argument("--process-group", action="store_true", help="measure the joint step in a process group too")
    parser.add_argument("--smoke", action="store_true", help="try the GPU half on two small images, on any device")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="default: a file in results/ by device; none with --smoke")
    options = parser.parse_args()
    gpu_half = options.device == "cuda" or options.smoke
    shapes = GPU_SHAPES if gpu_half else SHAPES
    models = options.models or list(shapes)
    if unknown := [name for name in models if name not in shapes]:
        parser.error(f"{', '.join(unknown)} is not measured here; choose among {', '.join(shapes)}")
    cpu = f"CPU, {torch.get_num_threads()} threads, {platform.machine()}"
    record: dict[str, Any] = {
        "command": command("train_step"),
        "seed": options.seed,
        "rounds": options.rounds,
        "device": torch.cuda.get_device_name() if options.device == "cuda" else cpu,
        "versions": versions(gpu_half),
    }
    if gpu_half:
        rows = measure_gpu(models, options)
        record |= {"derived": derive(rows), "rows": rows}
        print("\n".join(f"{name} {value}" for name, value in record["derived"].items()))
    else:
        record["rows"] = measure_cpu(models, options.rounds, options.seed)
    out = options.out or (None if options.smoke else default_out(record["device"]))
    if out is not None:
        out.parent.mkdir(exist_ok=True)
        out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
