"""An iteration of learning in `calibrate`, and its kernels, against PyTorch's operators, measured in one run.

    python benchmarks/calibration_step.py                       # a table, and results/calibration-step-h200.json
    python benchmarks/calibration_step.py --parts kernels       # the kernels alone
    python benchmarks/calibration_step.py --tiny                # tiny shapes on any device, to see that it works

`iterations`: all widths through the whole network at once, with random weights, forward, backward and update, weights
learning too; on a GPU as a recorded graph. "torch" is the same without the kernels of `calibrate/quick_nodes.py` and
without that which drops. The time is the median of what 20 iterations take, less the first 20.

`kernels`: norms with and without ReLU6, depthwise convolutions and dropping at the shapes of MobileNetV2, forward and
forward with backward. `floor_us` is what the bytes take at 4.8 TB/s, an H200's memory. Inputs rotate over 128 MB. `off`
is by how much values or gradients differ from PyTorch's at most, as a share of the largest.
"""

import argparse
import contextlib
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from timing import add_arguments, medians, repeated, significant, write_record
from torch import Tensor, nn

from bitdial import CalibrateConfig, QuantConfig, build_model, prepare
from bitdial.calibrate import reconstruct
from bitdial.calibrate.reconstruct import Reconstruction
from bitdial.calibrate.reference import float_copy
from bitdial.calibrate.tune import Tuning
from bitdial.calibrate.walk import Walk
from bitdial.dial.plan import BitPlan
from bitdial.kernels import depthwise, dropping, kept_norm

BITS = (8, 6, 4, 3)
BYTES_PER_US = 4.8e6  # of an H200's memory
ROTATED_BYTES, MOST_COPIES = 128 << 20, 32
HALF = 127  # the largest byte of an element that is dropped

Action = Callable[..., Tensor]


# --- whole networks ---------------------------------------------------------------------------------


def nothing(*given: object) -> dict[Any, Any]:
    """No nodes, and no to a question."""
    return {}


@contextlib.contextmanager
def plain_torch() -> Iterator[None]:
    """Within this, what learns does so without the kernels."""
    with (
        mock.patch.object(reconstruct, "quick_nodes", nothing),
        mock.patch.object(reconstruct, "can_drop", nothing),
    ):
        yield


def iteration_ms(name: str, options: argparse.Namespace) -> float:
    """Milliseconds of an iteration at all widths through the network called `name`."""
    torch.manual_seed(options.seed)
    device = torch.device(options.device)
    batch, size = (2, 32) if options.tiny else (options.batch, 224)
    batches = [torch.randn(batch, 3, size, size, device=device) for _ in range(2)]
    model = prepare(build_model(name).to(device).eval(), QuantConfig(bit_choices=BITS), batches[0])
    walk, settings = Walk(model, batches), {bits: BitPlan(default=bits) for bits in BITS}
    iterations = 1 if options.tiny else 20 * (1 + options.rounds)
    config = CalibrateConfig(effort="full", iterations=iterations, batch_size=batch, drop=options.drop)
    tuning = Tuning(model, walk, settings, config, walk.start(), float_copy(model))
    generator = torch.Generator(device).manual_seed(options.seed)
    learning = Reconstruction(model, tuning.block, settings, config, generator)
    start, found = tuning.start, [(0, time.perf_counter())]

    def report(iteration: int, errors: dict[int, float]) -> None:  # it has waited for the GPU
        found.append((iteration, time.perf_counter()))

    learning.learn(start, dict.fromkeys(settings, start), tuning.after, report)
    if device.type == "cuda" and learning.graphs is None:
        raise SystemExit(f"{name}: an iteration was not recorded")
    spans = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.pairwise(found)]
    return 1e3 * statistics.median(spans[1:] or spans)


def measure_network(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for PyTorch's operators and one for the kernels."""
    with plain_torch():
        plain = iteration_ms(name, options)
    ours = iteration_ms(name, options)
    rows = []
    for kind, ms in (("torch", plain), ("kernels", ours)):
        row = {"network": name, "path": kind, "drop": options.drop, "ms": significant(ms)}
        rows.append(row | {"speedup_vs_torch": significant(plain / ms)})
        print(f"{name:14} {kind:8} {ms:9.3f} ms an iteration {plain / ms:6.2f}x", flush=True)
    return rows


# --- kernels ----------------------------------------------------------------------------------------


class Case(NamedTuple):
    """An operation of a network: its kind, the images of a batch that it reads, and how often it comes.

    Of a convolution, its taps and stride.
    """

    kind: str
    channels: int
    size: int
    taps: int = 0
    stride: int = 1
    count: int = 1


TINY = [Case("norm", 4, 6), Case("norm relu6", 4, 5), Case("depthwise", 4, 7, 3, 2), Case("drop", 3, 5)]


def cases_of(name: str) -> list[Case]:
    """The different operations of a network at 224 x 224, in their order; what convolutions read is what is dropped."""
    found: dict[Case, int] = {}
    seen: list[tuple[nn.Module, int]] = []
    with torch.device("meta"):
        model = build_model(name)
        for module in model.modules():
            if isinstance(module, nn.Conv2d | nn.BatchNorm2d | nn.ReLU6):
                module.register_forward_pre_hook(lambda module, args: seen.append((module, args[0].shape[-1])))
        model(torch.empty(1, 3, 224, 224))
    for place, (module, size) in enumerate(seen):
        cases = []
        if isinstance(module, nn.BatchNorm2d):
            is_relu = isinstance(seen[place + 1][0], nn.ReLU6) if place + 1 < len(seen) else False
            cases.append(Case("norm relu6" if is_relu else "norm", module.num_features, size))
        elif isinstance(module, nn.Conv2d):
            cases.append(Case("drop", module.in_channels, size))
            if depthwise.fits(module):
                cases.append(Case("depthwise", module.in_channels, size, module.kernel_size[0], module.stride[0]))
        for case in cases:
            found[case] = found.get(case, 0) + 1
    kinds = sorted(found, key=lambda case: case.kind)
    return [case._replace(count=found[case]) for case in kinds]


class Work(NamedTuple):
    """An operation with its kernels and by PyTorch, other tensors it reads, and the passes over memory it needs."""

    ours: Action
    theirs: Action
    parameters: tuple[Tensor, ...]
    forward_bytes: int
    both_bytes: int


def work_of(case: Case, x: Tensor, seed: int) -> Work:
    """What `case` does with tensors like x."""
    size, device = x.numel() * x.element_size(), x.device
    if case.kind == "drop":
        source = dropping.Draws(torch.Generator(device).manual_seed(seed))
        plain = torch.randn_like(x, requires_grad=True)

        def where(value: Tensor, plain: Tensor) -> Tensor:
            words = torch.empty(-(-value.numel() // 8), dtype=torch.int64, device=device).random_(-(2**63), None)
            dropped = words.view(torch.uint8)[: value.numel()] <= HALF
            return torch.where(dropped.view(value.shape), plain, value)

        def drop(value: Tensor, plain: Tensor) -> Tensor:
            fits = dropping.can_drop(value, plain)
            return dropping.drop(value, plain, source, HALF) if fits else where(value, plain)

        return Work(drop, where, (plain,), 3 * size, 6 * size)
    if case.kind == "depthwise":
        channels, padding = case.channels, case.taps // 2
        conv = nn.Conv2d(
            channels, channels, case.taps, case.stride, padding, groups=channels, bias=False, device=device
        )

        def torch_conv(x: Tensor, weight: Tensor) -> Tensor:
            return F.conv2d(x, weight, None, conv.stride, conv.padding, 1, channels)

        def our_conv(x: Tensor, weight: Tensor) -> Tensor:
            fits = depthwise.can_convolve(x, weight, conv)
            return depthwise.convolve(x, weight, conv) if fits else torch_conv(x, weight)

        passed = size + size * torch_conv(x[:1], conv.weight).numel() // x[:1].numel()
        return Work(our_conv, torch_conv, (conv.weight,), passed, 3 * passed)
    norm = nn.BatchNorm2d(case.channels, device=device).eval()
    relu_max = 6.0 if case.kind == "norm relu6" else None

    def torch_norm(x: Tensor, *line: Tensor) -> Tensor:
        found = norm(x)
        return found if relu_max is None else F.relu6(found)

    def our_norm(x: Tensor, *line: Tensor) -> Tensor:
        return kept_norm.normalize(x, norm, relu_max) if kept_norm.can_normalize(norm, x) else torch_norm(x)

    return Work(our_norm, torch_norm, (norm.weight, norm.bias), 2 * size, 5 * size)


def gradients(action: Action, x: Tensor, parameters: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    """The value of `action`, and the gradients of x and the parameters."""
    out = action(x, *parameters)
    return out, *torch.autograd.grad(out, (x, *parameters), grad)


def measure_case(case: Case, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for forward and one for both passes."""
    torch.manual_seed(options.seed)
    device = torch.device(options.device)
    shape = (2 if options.tiny else options.batch, case.channels, case.size, case.size)
    copies = 1 if options.tiny else min(MOST_COPIES, math.ceil(ROTATED_BYTES / (4 * math.prod(shape))))
    inputs = [torch.randn(shape, device=device, requires_grad=True) for _ in range(copies)]
    work = work_of(case, inputs[0], options.seed)
    grad = torch.randn_like(work.theirs(inputs[0], *work.parameters))
    actions = {"ours": work.ours, "torch": work.theirs}
    off = None
    if case.kind != "drop":
        pairs = zip(*(gradients(a, inputs[0], work.parameters, grad) for a in actions.values()), strict=True)
        off = max(float(((ours - theirs).abs().max() / theirs.abs().max()).detach()) for ours, theirs in pairs)
    rows = []
    for passes, size in (("forward", work.forward_bytes), ("forward and backward", work.both_bytes)):
        runs = {}
        for name, action in actions.items():
            if passes == "forward":
                calls = [functools.partial(torch.no_grad()(action), x, *work.parameters) for x in inputs]
            else:
                calls = [functools.partial(gradients, action, x, work.parameters, grad) for x in inputs]
            runs[name] = repeated(calls, device)
        times = medians(runs, options.rounds)
        row = {
            "kernel": case.kind, "passes": passes, "shape": [*shape], "taps": case.taps, "stride": case.stride,
            "count": case.count, "bytes": size, "floor_us": significant(size / BYTES_PER_US),
            "us": significant(times["ours"]), "torch_us": significant(times["torch"]), "off": off,
        }  # fmt: skip
        rows.append(row)
        print(line(row), flush=True)
    return rows


def line(row: dict[str, Any]) -> str:
    """A row as a line of the printed table."""
    where = f"{row['kernel']:10} {'x'.join(map(str, row['shape'])):16} /{row['stride']} {row['passes']:21}"
    times = f"{row['count']:2} times {row['us']:9.1f} us, floor {row['floor_us']:7.1f}, torch {row['torch_us']:9.1f}"
    return f"{where} {times}" + ("" if row["off"] is None else f", off {row['off']:.1e}")


def totals(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each kernel: milliseconds of all its calls in one pass of the network at one width, both ways."""
    found = []
    for kind in dict.fromkeys(row["kernel"] for row in rows):
        mine = [row for row in rows if row["kernel"] == kind and row["passes"] != "forward"]
        names = {"floor_ms": "floor_us", "ms": "us", "torch_ms": "torch_us"}
        sums = {name: sum(r[part] * r["count"] for r in mine) / 1e3 for name, part in names.items()}
        found.append({"kernel": kind, **{name: significant(value) for name, value in sums.items()}})
        print(found[-1], flush=True)
    return found


def main() -> None:
    """Measure, print tables, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, rounds=5)
    parser.add_argument("--parts", nargs="+", choices=["iterations", "kernels"], default=["iterations", "kernels"])
    parser.add_argument("--networks", nargs="+", choices=["mobilenet_v2", "resnet50"])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--drop", type=float, default=0.5, help="the share that is dropped in an iteration")
    options = parser.parse_args()
    networks = options.networks or (["mobilenet_v2"] if options.tiny else ["mobilenet_v2", "resnet50"])
    rows: dict[str, list[dict[str, Any]]] = {"iterations": [], "kernels": []}
    for name in networks if "iterations" in options.parts else ():
        rows["iterations"] += measure_network(name, options)
        write_record("calibration-step", options, script="calibration_step", complete=False, **rows)
    cases = TINY if options.tiny else cases_of("mobilenet_v2")
    for case in cases if "kernels" in options.parts else ():
        rows["kernels"] += measure_case(case, options)
        write_record("calibration-step", options, script="calibration_step", complete=False, **rows)
    found = totals(rows["kernels"])
    write_record("calibration-step", options, script="calibration_step", **rows, totals=found)


if __name__ == "__main__":
    main()
