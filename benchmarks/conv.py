"""Convolutions on integer codes against cuDNN in bf16, layer by layer, measured in one run.

    python benchmarks/conv.py                   # ResNet18/50, batch 1, 32, 256: a table, and results/conv-h200.json
    python benchmarks/conv.py --sweep           # the same for many tilings of each layer; the best are printed
    python benchmarks/conv.py --tiny            # tiny layers on any device, to see that it works

Contenders for each layer of a network, at its size for images of 224 x 224:

    bf16            the convolution alone by cuDNN in bf16, channels last, benchmark mode
    bf16 compiled   convolution, batch norm and ReLU in bf16 under torch.compile; only with --compile
    integer         ours: convolution, batch norm, ReLU and the next layer's quantizer in one kernel

All run as CUDA graphs. Inputs rotate over 128 MB, or 32 copies where that is less. `exact` says that the codes equal
those of sums in float64. Weights are one int8 for each code, so at one layer the widths differ by nothing, but for
codes of 8 bits by `centred`, which take a sum of activations too: "integer halves". "integer centred" is the same
kernel at lower widths, which reads a number in memory to know; "integer" has no such number.

A linear layer is a 1x1 convolution of one pixel: `--linear M N K` adds one, against bf16 matmul.
"""

import argparse
import itertools
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

if "--tiny" in sys.argv and not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported

import torch
import torch.nn.functional as F
from timing import Call, add_arguments, medians, repeated, significant, write_record
from torch import Tensor, nn

from bitdial import build_model
from bitdial.kernels.conv_shape import conv_shape
from bitdial.kernels.epilogue import Epilogue, channels_last
from bitdial.kernels.operands import PAD_CODES, IntegerOperands
from bitdial.kernels.reference.epilogue import scale_sums
from bitdial.kernels.reference.integer_sums import float64_sums
from bitdial.kernels.triton.inference import integer as triton_integer
from bitdial.kernels.triton.inference.tiles import default_tiles
from bitdial.kernels.triton.tiles import Tiles, power_of_2

ROTATED_BYTES = 128 << 20  # of a layer's inputs
MOST_COPIES = 32
KINDS = {"integer": None, "integer centred": 0, "integer halves": 1}


class Shape(NamedTuple):
    """A convolution: channels, image size, output channels, filter, stride, padding, groups; and how often it comes."""

    channels: int
    size: int
    outputs: int
    taps: int
    stride: int
    padding: int
    groups: int
    count: int = 1


TINY = [Shape(16, 6, 16, 3, 1, 1, 1), Shape(16, 5, 8, 1, 2, 0, 1), Shape(8, 5, 8, 3, 1, 1, 8)]


def layers_of(name: str) -> list[Shape]:
    """The different convolutions of a network at 224 x 224, in their order."""
    found: dict[Shape, int] = {}

    def see(conv: Any, args: Any) -> None:
        shape = Shape(
            conv.in_channels, args[0].shape[-1], conv.out_channels, conv.kernel_size[0], conv.stride[0],
            conv.padding[0], conv.groups,
        )  # fmt: skip
        found[shape] = found.get(shape, 0) + 1

    with torch.device("meta"):
        model = build_model(name)
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                module.register_forward_pre_hook(see)
        model(torch.empty(1, 3, 224, 224))
    return [shape._replace(count=count) for shape, count in found.items()]


class Work:
    """Operands of one layer at one batch size, ours and in bf16."""

    def __init__(self, shape: Shape, batch: int, device: str, seed: int, *, rotate: bool):
        self.shape, self.batch = shape, batch
        generator = torch.Generator().manual_seed(seed)
        c, k, r = shape.channels, shape.outputs, shape.taps
        image = (batch, c, shape.size, shape.size)
        copies = min(MOST_COPIES, math.ceil(ROTATED_BYTES / math.prod(image))) if rotate else 1
        codes = torch.randint(-128, 128, image, generator=generator, dtype=torch.int8)
        codes = codes.to(device).contiguous(memory_format=torch.channels_last)
        self.codes = [codes.clone() for _ in range(copies)]
        self.floats = [codes.bfloat16() for _ in range(copies)]
        weight = torch.randint(-128, 128, (k, r, r, c // shape.groups), generator=generator, dtype=torch.int8)
        self.weight = weight.to(device)
        self.norm = torch.randn(2, k, generator=generator).to(device)
        self.factor = torch.full((k,), 1e-4, device=device)
        self.quantizer = torch.tensor([0.03, 0, 0, 255, 128], device=device)
        self.pad = torch.full((PAD_CODES,), -128, dtype=torch.int8, device=device)
        moves = ((shape.stride,) * 2, (shape.padding,) * 2, (1, 1), shape.groups)
        self.geometry = conv_shape(codes, self.weight, *moves)
        self.pixels = batch * self.geometry.out_height * self.geometry.out_width

    def correction(self, doubled: int | None) -> Tensor:
        """128 times the sums of the weight's integers."""
        sums = self.weight.flatten(1).sum(dim=1, dtype=torch.int32)
        return 128 * (2 * sums + self.weight[0].numel() if doubled else sums)

    def ours(self, *, doubled: int | None, tiles: Tiles | None = None) -> list[Call]:
        """Convolution, norm, ReLU and quantizer by the kernel; a call gives the codes."""
        epilogue = Epilogue(self.norm, None, math.inf, self.quantizer, None, False)
        number = self.number(doubled)
        operands = IntegerOperands(self.weight, self.pad, self.correction(doubled), self.factor, number, None)
        arguments = (operands, self.geometry, epilogue)
        return [lambda x=x: triton_integer.convolve(x, *arguments, tiles=tiles)[1] for x in self.codes]

    def number(self, doubled: int | None) -> Tensor | None:
        """What tells the kernel whether codes are centred ones of 8 bits; None: they never are."""
        return None if doubled is None else torch.tensor([doubled], dtype=torch.int32, device=self.weight.device)

    def reference(self, *, doubled: int | None) -> Tensor:
        """The codes that `ours` must give, by sums in float64."""
        sums = float64_sums(self.codes[0], self.weight, self.pad, self.number(doubled), self.geometry)
        epilogue = Epilogue(self.norm, None, math.inf, self.quantizer, None, False)
        return scale_sums(channels_last(sums.float()), self.factor, None, epilogue)[1]

    def bf16(self, *, compiled: bool) -> list[Call]:
        """The convolution by cuDNN; compiled: with norm and ReLU."""
        weight = self.weight.permute(0, 3, 1, 2).bfloat16().contiguous(memory_format=torch.channels_last)
        moves = (self.shape.stride, self.shape.padding, 1, self.shape.groups)
        multiplier, offset = (line.bfloat16().view(-1, *(1,) * (2 * (self.shape.size > 1))) for line in self.norm)

        def convolve(x: Tensor) -> Tensor:
            if self.shape.size == 1:
                return F.linear(x.flatten(1), weight.flatten(1))
            return F.conv2d(x, weight, None, *moves)

        def convolve_norm_relu(x: Tensor) -> Tensor:
            return torch.relu(convolve(x) * multiplier + offset)

        action = torch.compile(convolve_norm_relu) if compiled else convolve
        return [lambda x=x: action(x) for x in self.floats]


def milliseconds(contenders: dict[str, list[Call]], options: argparse.Namespace) -> dict[str, float]:
    """The time of one call of each contender."""
    runs = {name: repeated(calls, torch.device(options.device)) for name, calls in contenders.items()}
    return {name: us / 1e3 for name, us in medians(runs, options.rounds).items()}


def candidates(work: Work) -> Iterator[Tiles]:
    """Tilings worth a try: what fits the layer, with 32 to 128 outputs a thread.

    A thread reads the numbers of a channel once for its pixels / (8 * warps) pixels: tall tiles on few warps read less.
    """
    g = work.geometry
    if g.is_depthwise:
        for pixels, channels in itertools.product((16, 32, 64, 128), (32, 64, 128)):
            yield Tiles(pixels, channels, channels, 4, 1)
        return
    usual = default_tiles(g, work.pixels)
    outputs = {min(size, power_of_2(g.out_channels // g.groups, 16, 128)) for size in (32, 64, 128)}
    for rows, width, warps in itertools.product((64, 128, 256, 512), sorted(outputs), (4, 8)):
        if not 32 <= rows * width // (32 * warps) <= 128 or (rows == 64 and work.pixels > 100_000):
            continue
        if usual.stages * (rows + width) * usual.inputs <= 200 << 10:
            yield Tiles(rows, usual.inputs, width, warps, usual.stages)


def measure(network: str, work: Work, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one layer at one batch size."""
    contenders = {"bf16": work.bf16(compiled=False)}
    if options.compile:
        contenders["bf16 compiled"] = work.bf16(compiled=True)
    for name, doubled in KINDS.items():
        contenders[name] = work.ours(doubled=doubled, tiles=options.tiles)
    times = milliseconds(contenders, options)
    where = {"network": network, "batch": work.batch, **work.shape._asdict()}
    rows = []
    for name, ms in times.items():
        row: dict[str, Any] = {
            "kernel": name,
            **where,
            "ms": significant(ms),
            "speedup_vs_bf16": significant(times["bf16"] / ms),
        }
        if name in KINDS:
            doubled = KINDS[name]
            scheme, bits = ("double_rounding", 8) if doubled is None else ("centred", 8 if doubled else 7)
            row |= {"weight_bits": bits, "act_bits": 8, "scheme": scheme}
            codes = contenders[name][0]()
            row["exact"] = torch.equal(codes, work.reference(doubled=doubled)) if work.batch <= 32 else None
        rows.append(row)
        print(line(row), flush=True)
    return rows


def sweep(network: str, work: Work, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each tiling of one layer, the quickest first."""
    rows = []
    base = milliseconds({"bf16": work.bf16(compiled=False)}, options)["bf16"]
    for tiles in [options.tiles] if options.tiles else list(candidates(work)):
        try:
            ms = milliseconds({"ours": work.ours(doubled=None, tiles=tiles)}, options)["ours"]
        except Exception as problem:  # too much shared memory, say: named and passed over
            print(f"{tiles}: {type(problem).__name__}: {str(problem).splitlines()[0]}", flush=True)
            continue
        where = {"network": network, "batch": work.batch, **work.shape._asdict()}
        row = {"kernel": "integer", **where, "ms": significant(ms), "speedup_vs_bf16": significant(base / ms)}
        rows.append(row | {"tiles": list(tiles)})
    rows.sort(key=lambda row: row["ms"])
    for row in rows[:3]:
        print(line(row), row["tiles"], flush=True)
    return rows


def line(row: dict[str, Any]) -> str:
    """A row as a line of the printed table."""
    shape = f"{row['channels']:4}x{row['size']:<3} -> {row['outputs']:4} {row['taps']}x{row['taps']}/{row['stride']}"
    text = f"{row['network']:9} batch {row['batch']:3} {shape:22} {row['kernel']:15} {row['ms']:9.4f} ms"
    text += f" {row['speedup_vs_bf16']:6.2f}x"
    return text + ("" if row.get("exact") is None else " exact" if row["exact"] else " WRONG")


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each network, batch and kernel: the geometric mean of the speed-ups, and the ratio of the summed times."""
    found = []
    keys = dict.fromkeys((row["network"], row["batch"], row["kernel"]) for row in rows if row["kernel"] != "bf16")
    for network, batch, kernel in keys:
        mine = [r for r in rows if (r["network"], r["batch"], r["kernel"]) == (network, batch, kernel)]
        base = [r for r in rows if (r["network"], r["batch"], r["kernel"]) == (network, batch, "bf16")]
        logs = [math.log(row["speedup_vs_bf16"]) * row["count"] for row in mine]
        mean = math.exp(sum(logs) / sum(row["count"] for row in mine))
        total = sum(r["ms"] * r["count"] for r in base) / sum(r["ms"] * r["count"] for r in mine)
        found.append({
            "network": network, "batch": batch, "kernel": kernel, "mean_speedup": significant(mean),
            "all_layers_speedup": significant(total),
        })  # fmt: skip
    return found


def compile_ahead(processes: int) -> None:
    """Fill Triton's cache from several processes that each launch a share of the kernels once."""
    arguments = [a for a in sys.argv[1:] if not a.startswith("--compile-ahead")]
    command = [sys.executable, __file__, *arguments]
    running = [subprocess.Popen([*command, "--share", str(i), str(processes)]) for i in range(processes)]
    for process in running:
        process.wait()


def launch_once(jobs: list[tuple[str, Shape, int]], options: argparse.Namespace) -> None:
    """Launch each kernel of this process's share, so that it is compiled."""
    mine, of = options.share
    for i, (_, shape, batch) in enumerate(jobs):
        work = Work(shape, batch, options.device, options.seed, rotate=False)
        tilings = list(candidates(work)) if options.sweep else [options.tiles]
        for j, tiles in enumerate(tilings):
            if (i + j) % of == mine:
                for doubled in (None,) if options.sweep else KINDS.values():
                    try:
                        work.ours(doubled=doubled, tiles=tiles)[0]()
                    except Exception:  # the run itself will name it
                        continue


def main() -> None:
    """Measure, print a table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--networks", nargs="+", choices=["resnet18", "resnet50", "mobilenet_v2"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 32, 256])
    parser.add_argument("--linear", nargs=3, type=int, metavar=("M", "N", "K"), action="append", default=[])
    parser.add_argument("--compile", action="store_true", help="measure bf16 under torch.compile too")
    parser.add_argument("--sweep", action="store_true", help="measure many tilings of each layer instead")
    parser.add_argument("--tiles", nargs=5, type=int, metavar=tuple(name.upper() for name in Tiles._fields))
    parser.add_argument("--compile-ahead", type=int, default=0, help="processes that compile before measuring")
    parser.add_argument("--share", nargs=2, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.tiles = Tiles(*options.tiles) if options.tiles else None
    if options.compile_ahead:
        compile_ahead(options.compile_ahead)
    names = options.networks or ([] if options.linear or options.tiny else ["resnet18", "resnet50"])
    jobs = [(name, shape, batch) for name in names for batch in options.batches for shape in layers_of(name)]
    jobs += [("linear", Shape(k, 1, n, 1, 1, 0, 1), m) for m, n, k in options.linear]
    if options.tiny and not jobs:
        jobs = [("tiny", shape, 2) for shape in TINY]
    rows: list[dict[str, Any]] = []
    file = "conv-sweep" if options.sweep else "conv"
    with torch.no_grad(), torch.backends.cudnn.flags(enabled=True, benchmark=True):
        if options.share:
            launch_once(jobs, options)
            return
        for name, shape, batch in jobs:
            work = Work(shape, batch, options.device, options.seed, rotate=not options.tiny)
            rows += sweep(name, work, options) if options.sweep else measure(name, work, options)
            found = [] if options.sweep else summary(rows)
            write_record(file, options, script="conv", complete=False, summary=found, rows=rows)
    found = [] if options.sweep else summary(rows)
    for entry in found:
        print(entry)
    write_record(file, options, script="conv", summary=found, rows=rows)


if __name__ == "__main__":
    main()
