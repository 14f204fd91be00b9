"""Linear layers on packed weights against bf16, against other libraries, and against the bytes that must be read.

    python benchmarks/linear.py                    # a table, and results/linear-h200.json
    python benchmarks/linear.py --sweep            # tries settings for few tokens, prints the best for each shape
    python benchmarks/linear.py --group-size 0 64  # a scale for each row, and for each 64 inputs of a row, side by side
    python benchmarks/linear.py --tiny             # a try on any machine, under Triton's interpreter without a GPU

`nested` reads one buffer at every width. `packed` has a buffer for each width, as double_rounding does after a switch.
`nested g64` has scales of groups of 64 inputs as bytes beside a float32 for each row, `nested g64f` as float32.
Each contender has so many copies of its weight that one round over them reads more than 256 MB, so no cache helps;
a round is one CUDA graph; contenders alternate, and times are medians over rounds. The floor is the time in which a
kernel that copies, measured in the same run, moves as many bytes as the layer must read and write: the weight's bits,
scales, tokens and outputs. Every output is compared with a float32 product before it is timed; other libraries round
weights by their own rules, so theirs are held to 30 %.
"""

import argparse
import contextlib
import itertools
import math
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from linear_peers import PEERS, installed
from linear_weights import BITS, Layer, Ours, Packed, packed_weight, with_settings
from timing import add_arguments, copy_speed, medians, repeated, write_record
from torch import Tensor

HEADLINE = [(4096, 4096), (14336, 4096), (4096, 14336), (8192, 28672)]
SHAPES = [(2048, 2048), (2048, 8192), *HEADLINE]
MOST_CALLS, COLD_BYTES = 400, 300 << 20


# --- contenders ---------------------------------------------------------------------------------


def floor_bytes(shape: tuple[int, int], tokens: int, bits: float, group_bytes: int = 0) -> float:
    """What must be read and written: the weight, a scale a row unless it is bf16, those of groups, tokens, outputs."""
    rows, columns = shape
    return rows * columns * bits / 8 + group_bytes + (4 * rows if bits < 16 else 0) + 2 * tokens * (rows + columns)


def copies(shape: tuple[int, int], bits: float) -> int:
    """How many weights a round goes through, so that more than 256 MB are read."""
    return max(2, math.ceil(COLD_BYTES / (shape[0] * shape[1] * bits / 8)))


def check(name: str, y: Tensor, exact: Tensor, tolerance: float) -> None:
    """Refuse to time a wrong result."""
    worst = float((y.float() - exact).abs().max() / exact.abs().max())
    if not worst <= tolerance:
        raise ValueError(f"{name} is off by {worst:.2g} of the largest output")


# --- one shape ----------------------------------------------------------------------------------


class Contender(NamedTuple):
    """Copies of a layer, what its weight says (rows, columns), how far its output may be off, its groups' scales."""

    layers: list[Layer]
    values: Tensor
    tolerance: float
    group_bytes: int = 0


class Bench:
    """What the measurements share."""

    def __init__(self, options: argparse.Namespace, device: torch.device):
        self.options, self.device = options, device
        self.speed = copy_speed(device, 1 << 20 if options.tiny else 1 << 30)

    def count(self, shape: tuple[int, int], bits: float) -> int:
        return 2 if self.options.tiny else min(MOST_CALLS, copies(shape, bits))

    def tokens(self, count: int, columns: int) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(count)
        return torch.randn(count, columns, generator=generator, device=self.device).to(torch.bfloat16)

    def timer(self, name: str, contender: Contender, x: Tensor) -> Callable[[], float]:
        """A timer of all its copies, after the output of the first was checked."""
        check(name, contender.layers[0](x), x.float() @ contender.values.T, contender.tolerance)
        return repeated([lambda layer=layer: layer(x) for layer in contender.layers], self.device)

    def weights(self, kind: Ours, shape: tuple[int, int], bits: int) -> list[Packed]:
        """Our weight as often as a round needs it; other addresses are all that counts."""
        first = packed_weight(kind, shape, bits, 0, self.device)
        return [first, *(first.copy() for _ in range(self.count(shape, bits) - 1))]

    def ours(self, kind: Ours, shape: tuple[int, int], bits: int) -> Contender:
        weights = self.weights(kind, shape, bits)
        layers = [with_settings(weight, bits, None) for weight in weights]
        return Contender(layers, weights[0].values, 0.02, kind.group_bytes(shape))

    def theirs(self, name: str, shape: tuple[int, int], bits: int) -> Contender | None:
        weight = packed_weight(Ours("packed"), shape, bits, 0, self.device).values.to(torch.bfloat16)
        first = PEERS[name](weight.clone(), bits)
        if first is None:
            return None
        made = (PEERS[name](weight.clone(), bits) for _ in range(self.count(shape, bits) - 1))
        return Contender([first, *(layer for layer in made if layer is not None)], weight.float(), 0.3)

    def bf16(self, shape: tuple[int, int]) -> Contender:
        generator = torch.Generator(self.device).manual_seed(0)
        first = torch.randn(shape, generator=generator, device=self.device).to(torch.bfloat16)
        weights = [first, *(first.clone() for _ in range(self.count(shape, 16) - 1))]
        layers: list[Layer] = [lambda x, weight=weight: F.linear(x, weight) for weight in weights]
        return Contender(layers, first.float(), 0.02)

    def rows(self, shape: tuple[int, int], numbers_of_tokens: list[int]) -> Iterator[dict[str, Any]]:
        """All contenders at one shape; one width at a time, so that memory suffices."""
        for bits in self.options.bits:
            contenders: dict[str, Contender] = {"bf16": self.bf16(shape)}
            for kind in kinds(self.options, [bits], shape):
                contenders[kind.name] = self.ours(kind, shape, bits)
            errors: dict[str, str] = {}
            for name in self.options.peers:
                with noting(name, errors):
                    if (found := self.theirs(name, shape, bits)) is not None:
                        contenders[name] = found
            for tokens in numbers_of_tokens:
                yield from self.rows_at(shape, bits, tokens, contenders, errors)
            del contenders
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def rows_at(
        self, shape: tuple[int, int], bits: int, tokens: int, contenders: dict[str, Contender], failed: dict[str, str]
    ) -> Iterator[dict[str, Any]]:
        """All contenders at one shape, width and number of tokens."""
        x = self.tokens(tokens, shape[1])
        runs: dict[str, Callable[[], float]] = {}
        errors = dict(failed)
        for name, contender in contenders.items():
            if name in self.options.peers:
                with noting(name, errors):
                    runs[name] = self.timer(name, contender, x)
            else:
                runs[name] = self.timer(name, contender, x)
        times = medians(runs, self.options.rounds)
        where = {"N": shape[0], "K": shape[1], "M": tokens}
        for name, taken in times.items():
            width = 16 if name == "bf16" else bits
            floor = floor_bytes(shape, tokens, width, contenders[name].group_bytes) / self.speed
            row = {"kernel": name, **where, "weight_bits": width, "act_bits": 16, "us": round(taken, 3)}
            row |= {"speedup_vs_bf16": round(times["bf16"] / taken, 3), "floor_share": round(floor / taken, 3)}
            per_row = name.partition(" g")[0]
            if per_row != name and per_row in times:
                row["time_vs_per_row"] = round(taken / times[per_row], 3)
            print(line(row), flush=True)
            if name != "bf16" or bits == self.options.bits[0]:
                yield row
        for name, error in errors.items():
            print(f"{name}: {error}", flush=True)
            yield {"kernel": name, **where, "weight_bits": bits, "act_bits": 16, "error": error}


def kinds(options: argparse.Namespace, widths: list[int], shape: tuple[int, int] | None = None) -> list[Ours]:
    """Our kinds of weights that have these widths, and groups that divide the columns of `shape`."""
    found = []
    for words, group in itertools.product(options.kernels, options.group_size):
        if (words == "packed" or set(widths) <= set(BITS)) and (not group or shape is None or shape[1] % group == 0):
            found += [
                Ours(words, group, floats) for floats in ((False, True) if group and options.floats else (False,))
            ]
    return found


@contextlib.contextmanager
def noting(name: str, errors: dict[str, str]) -> Iterator[None]:
    """Another library's failure is a finding, not the end of the run."""
    try:
        yield
    except Exception as problem:
        errors[name] = f"{type(problem).__name__}: {str(problem).splitlines()[0] if str(problem) else ''}"


def line(row: dict[str, Any]) -> str:
    """A row as a line of the printed table."""
    where = f"{row['kernel']:12} {row['N']:6} x {row['K']:6}  M {row['M']:5}  w{row['weight_bits']:<2}"
    share = 100 * row["floor_share"]
    ratio = f"  {row['time_vs_per_row']:5.3f} of the time per row" if "time_vs_per_row" in row else ""
    return f"{where} {row['us']:9.2f} us  {row['speedup_vs_bf16']:5.2f}x bf16  {share:5.1f} % of the floor{ratio}"


def headline(rows: list[dict[str, Any]], shapes: list[tuple[int, int]]) -> dict[str, float]:
    """The geometric mean over `shapes` of the speed-up over bf16 at one token, by kernel and width."""
    found = {}
    for kernel, bits in sorted({(r["kernel"], r["weight_bits"]) for r in rows if r["kernel"] != "bf16"}):
        ratios = [r["speedup_vs_bf16"] for r in rows if (r["kernel"], r["weight_bits"], r["M"]) == (kernel, bits, 1)
                  and (r["N"], r["K"]) in shapes and "error" not in r]  # fmt: skip
        if len(ratios) == len(shapes):
            found[f"{kernel} w{bits}"] = round(math.exp(sum(map(math.log, ratios)) / len(ratios)), 3)
    return found


def group_ratios(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """The time with groups over that with a scale per row: geometric mean and worst shape, by kernel, width, tokens."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if "time_vs_per_row" in row:
            found.setdefault(f"{row['kernel']} w{row['weight_bits']} M{row['M']}", []).append(row["time_vs_per_row"])
    return {key: {"mean": round(math.exp(sum(map(math.log, ratios)) / len(ratios)), 3), "worst": max(ratios)}
            for key, ratios in found.items()}  # fmt: skip


# --- the sweep ----------------------------------------------------------------------------------


def few_candidates(text: str | None) -> list[Any]:
    """Settings to try; `text` as "row_tiles,warps,splits,ahead,stages,registers[,spread] ..." names others."""
    from bitdial.kernels.triton.packed.few_settings import FewSettings

    if text is None:
        text = ("1,8,1,1,1,0 1,8,1,0,1,0 1,4,1,1,1,0 1,4,1,0,1,0 1,16,1,1,1,0 1,8,1,0,3,0 1,4,1,0,3,0 1,4,1,0,4,0 "
                "2,8,1,1,1,0 2,8,1,0,1,0 2,4,1,1,1,0 2,4,1,0,3,0 1,8,2,1,1,0 1,4,2,1,1,0 2,4,2,1,1,0 2,8,2,1,1,0 "
                "1,8,1,1,1,64 4,4,2,0,1,0 4,4,4,0,1,0 4,8,4,0,1,0")  # fmt: skip
    made = []
    for item in text.split():
        row_tiles, warps, splits, ahead, stages, registers, *spread = map(int, item.split(","))
        made.append(FewSettings(row_tiles, warps, splits, bool(ahead), stages, registers or None, *spread))
    return made


def compile_ahead(work: list[tuple[Ours | str, tuple[int, int], int, int, Any]], jobs: int) -> None:
    """Compile side by side into the caches on disk; one after the other it would take minutes."""
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(run_once, work))


def run_once(work: tuple[Ours | str, tuple[int, int], int, int, Any]) -> None:
    """Run one contender once; those that cannot run are named when they are measured."""
    name, shape, tokens, bits, settings = work
    device = torch.device("cuda")
    x = torch.zeros(tokens, shape[1], dtype=torch.bfloat16, device=device)
    with contextlib.suppress(Exception):
        if isinstance(name, str):
            layer = PEERS[name](torch.randn(shape, dtype=torch.bfloat16, device=device), bits)
        else:
            layer = with_settings(packed_weight(name, shape, bits, 0, device), bits, settings)
        if layer is not None:
            layer(x)


def sweep(bench: Bench, shape: tuple[int, int], tokens: int, bits: int, kind: Ours) -> dict[str, Any]:
    """The times of all settings at one shape, and the best."""
    candidates = few_candidates(bench.options.few)[: 2 if bench.options.tiny else None]
    x = bench.tokens(tokens, shape[1])
    weights = bench.weights(kind, shape, bits)
    runs: dict[str, Callable[[], float]] = {"bf16": bench.timer("bf16", bench.bf16(shape), x)}
    failed = {}
    for settings in candidates:
        key = ",".join(str(int(part or 0)) for part in settings)
        try:
            layers = [with_settings(weight, bits, settings) for weight in weights]
            runs[key] = bench.timer(key, Contender(layers, weights[0].values, 0.02), x)
        except Exception as problem:  # too much shared memory, too few registers: not a setting for this GPU
            failed[key] = f"{type(problem).__name__}: {str(problem).splitlines()[0] if str(problem) else ''}"
    times = medians(runs, bench.options.rounds)
    floor = floor_bytes(shape, tokens, bits, kind.group_bytes(shape)) / bench.speed
    base = times.pop("bf16")
    order = sorted(times, key=lambda key: times[key])
    print(
        f"{kind.name} {shape[0]} x {shape[1]}  M {tokens}  w{bits}  bf16 {base:.2f} us, floor {floor:.2f} us",
        flush=True,
    )
    for key in order[:5]:
        print(
            f"    {key:16} {times[key]:8.2f} us  {base / times[key]:5.2f}x  {100 * floor / times[key]:5.1f} %",
            flush=True,
        )
    for key, reason in failed.items():
        print(f"    {key:16} {reason}", flush=True)
    return {"kernel": kind.name, "N": shape[0], "K": shape[1], "M": tokens, "weight_bits": bits, "bf16_us": base,
            "floor_us": floor, "us": {key: round(times[key], 3) for key in order}, "failed": failed}  # fmt: skip


def best_overall(found: list[dict[str, Any]]) -> None:
    """Print, for each width and number of tokens, the settings with the best geometric mean over the shapes."""
    for tokens, bits, kind in sorted({(f["M"], f["weight_bits"], f["kernel"]) for f in found}):
        group = [f for f in found if (f["M"], f["weight_bits"], f["kernel"]) == (tokens, bits, kind)]
        keys = set.intersection(*(set(f["us"]) for f in group))
        means = {key: math.prod(f["bf16_us"] / f["us"][key] for f in group) ** (1 / len(group)) for key in keys}
        top = sorted(means, key=lambda key: -means[key])[:4]
        print(f"best {kind} M {tokens} w{bits}: " + "   ".join(f"{key} {means[key]:.2f}x" for key in top), flush=True)


def sweeps(bench: Bench, shapes: list[tuple[int, int]], tokens: list[int], about: dict[str, Any]) -> None:
    """Try all settings at all shapes; print the best and write the file."""
    options = bench.options
    if bench.device.type == "cuda":
        settings = few_candidates(options.few)
        ours = kinds(options, options.bits)
        compile_ahead(list(itertools.product(ours, [(64, 4096)], tokens, options.bits, settings)), options.jobs)
    found: list[dict[str, Any]] = []
    for shape, m, bits in itertools.product(shapes, tokens, options.bits):
        for kind in kinds(options, [bits], shape):
            found.append(sweep(bench, shape, m, bits, kind))
            write_record("linear-sweep", options, script="linear", complete=False, **about, sweep=found)
    best_overall(found)
    write_record("linear-sweep", options, script="linear", **about, sweep=found)


# --- the script ---------------------------------------------------------------------------------


def shape_of(text: str) -> tuple[int, int]:
    """ "4096x14336" as (rows, columns)."""
    rows, columns = map(int, text.split("x"))
    return rows, columns


def main() -> None:
    """Measure, print a table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", type=shape_of, help="ROWSxCOLUMNS")
    parser.add_argument("--tokens", nargs="+", type=int)
    parser.add_argument("--bits", nargs="+", type=int, default=list(BITS))
    parser.add_argument("--kernels", nargs="+", choices=["nested", "packed"], default=["nested", "packed"])
    parser.add_argument(
        "--group-size", nargs="+", type=int, default=[0], help="inputs that share a scale; 0: all of a row"
    )
    parser.add_argument("--floats", action="store_true", help="groups' scales as float32, too, beside those as bytes")
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--sweep", action="store_true", help="try settings of the kernel for up to 16 tokens instead")
    parser.add_argument("--few", help='settings to try: "row_tiles,warps,splits,ahead,stages,registers[,spread] ..."')
    parser.add_argument("--jobs", type=int, default=12, help="processes that compile before anything is measured")
    add_arguments(parser)
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cpu":
        if not options.tiny:
            print("No GPU here: nothing to measure. --tiny tries the script under Triton's interpreter.")
            return
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported, which the first kernel does
    shapes = options.shapes or ([(32, 512)] if options.tiny else HEADLINE if options.sweep else SHAPES)
    tokens = options.tokens or ([1, 16] if options.sweep else [1, 20] if options.tiny else [1, 4, 8, 16, 2048])
    missing = [name for name in options.peers if name not in installed() or device.type == "cpu"]
    options.peers = [name for name in options.peers if name not in missing]
    if missing and not options.sweep:
        print(
            f"Left out, as they are not here or need a GPU: {', '.join(missing)}; linear_peers.py says how to get them"
        )
    bench = Bench(options, device)
    print(f"A copying kernel moves {bench.speed / 1e6:.2f} TB/s", flush=True)
    about = {"copy_tb_s": round(bench.speed / 1e6, 3), "left_out": missing}
    if options.sweep:
        sweeps(bench, shapes, tokens, about)
        return
    if device.type == "cuda":
        names = [*kinds(options, options.bits), *options.peers]
        compile_ahead(list(itertools.product(names, shapes, tokens, options.bits, [None])), options.jobs)
    rows: list[dict[str, Any]] = []
    for shape in shapes:
        for row in bench.rows(shape, tokens):
            rows.append(row)
            write_record("linear", options, complete=False, **about, headline=headline(rows, HEADLINE), rows=rows)
    means = headline(rows, HEADLINE)
    for name, value in means.items():
        print(f"geometric mean at M 1: {name} {value:.2f}x bf16")
    ratios = group_ratios(rows)
    for name, ratio in ratios.items():
        print(f"of the time with a scale per row: {name} {ratio['mean']:.3f} on average, {ratio['worst']:.3f} at worst")
    write_record("linear", options, **about, headline=means, groups_vs_per_row=ratios, rows=rows)


if __name__ == "__main__":
    main()
