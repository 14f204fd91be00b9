"""Linear layers on packed weights against bf16, against other libraries, and against the bytes that must be read.

    python benchmarks/linear.py                    # a table, and results/linear-h200.json
    python benchmarks/linear.py --sweep            # tries settings for few tokens, prints the best for each shape
    python benchmarks/linear.py --tiny             # a try on any machine, under Triton's interpreter without a GPU

`nested` reads one buffer at every width. `packed` has a buffer for each width, as double_rounding does after a switch.
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
from timing import add_arguments, copy_speed, medians, repeated, write_record
from torch import Tensor

from bitdial import functional as bf
from bitdial.kernels.packed_ops import PackedWeight
from bitdial.kernels.word_layout import pack_words, packed_fields

HEADLINE = [(4096, 4096), (14336, 4096), (4096, 14336), (8192, 28672)]
SHAPES = [(2048, 2048), (2048, 8192), *HEADLINE]
BITS = (8, 6, 4, 3, 2)
MOST_CALLS, COLD_BYTES = 400, 300 << 20

Layer = Callable[[Tensor], Tensor]


# --- contenders ---------------------------------------------------------------------------------


def quantized(shape: tuple[int, int], bits: int, scheme: str, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Random 8-bit codes narrowed to `bits`, and scales of one step at 8 bits."""
    generator = torch.Generator(device).manual_seed(seed)
    codes = torch.randint(-128, 128, shape, generator=generator, device=device, dtype=torch.int8)
    scale = torch.rand(shape[0], generator=generator, device=device) * 1e-4 + 1e-4
    return bf.narrow(codes, high=8, low=bits, scheme=scheme), scale


def packed_weight(kind: str, shape: tuple[int, int], bits: int, seed: int, device: torch.device) -> PackedWeight:
    """The weight as `nested` or as `packed` for one width."""
    if kind == "nested":
        return PackedWeight.nested(*quantized(shape, 8, "nested", seed, device), bit_choices=BITS, name="benchmark")
    codes, scale = quantized(shape, bits, "double_rounding", seed, device)
    fields = packed_fields(bits)
    return PackedWeight(
        name="benchmark", words=pack_words(codes, fields), scale=scale, columns=shape[1], fields=fields, high=8,
        scheme="double_rounding",
    )  # fmt: skip


def values(weight: PackedWeight, bits: int) -> Tensor:
    """What the packed weight says at `bits`, float32."""
    return bf.dequantize(weight.codes(bits), weight.scale, shift=weight.high - bits, scheme=weight.scheme)


def with_settings(weight: PackedWeight, bits: int, settings: Any) -> Layer:
    """Our layer by its op, or with chosen settings."""
    if settings is None:
        return lambda x: weight.linear(x, bits)
    from bitdial.kernels.triton.packed import linear as triton_linear

    centred = bf.scheme_of(weight.scheme).offset == 0.5
    return lambda x: triton_linear.linear(
        x, weight.words, weight.scale, None, fields=weight.fields, bits=bits, high=weight.high, centred=centred,
        settings=settings,
    )  # fmt: skip


def floor_bytes(shape: tuple[int, int], tokens: int, bits: float) -> float:
    """What must be read and written: the weight, a scale a row unless it is bf16, tokens, outputs."""
    rows, columns = shape
    return rows * columns * bits / 8 + (4 * rows if bits < 16 else 0) + 2 * tokens * (rows + columns)


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
    """Copies of a layer, what its weight says (rows, columns), and how far its output may be off."""

    layers: list[Layer]
    values: Tensor
    tolerance: float


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

    def weights(self, kind: str, shape: tuple[int, int], bits: int) -> list[PackedWeight]:
        """Our weight as often as a round needs it; other addresses are all that counts."""
        first = packed_weight(kind, shape, bits, 0, self.device)
        others = range(self.count(shape, bits) - 1)
        return [first, *(PackedWeight(**{**vars(first), "words": first.words.clone()}) for _ in others)]

    def ours(self, kind: str, shape: tuple[int, int], bits: int) -> Contender:
        weights = self.weights(kind, shape, bits)
        return Contender([with_settings(weight, bits, None) for weight in weights], values(weights[0], bits), 0.02)

    def theirs(self, name: str, shape: tuple[int, int], bits: int) -> Contender | None:
        weight = values(packed_weight("packed", shape, bits, 0, self.device), bits).to(torch.bfloat16)
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
            for kind in self.options.kernels:
                if kind == "packed" or bits in BITS:
                    contenders[kind] = self.ours(kind, shape, bits)
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
            floor = floor_bytes(shape, tokens, width) / self.speed
            row = {"kernel": name, **where, "weight_bits": width, "act_bits": 16, "us": round(taken, 3)}
            row |= {"speedup_vs_bf16": round(times["bf16"] / taken, 3), "floor_share": round(floor / taken, 3)}
            print(line(row), flush=True)
            if name != "bf16" or bits == self.options.bits[0]:
                yield row
        for name, error in errors.items():
            print(f"{name}: {error}", flush=True)
            yield {"kernel": name, **where, "weight_bits": bits, "act_bits": 16, "error": error}


@contextlib.contextmanager
def noting(name: str, errors: dict[str, str]) -> Iterator[None]:
    """Another library's failure is a finding, not the end of the run."""
    try:
        yield
    except Exception as problem:
        errors[name] = f"{type(problem).__name__}: {str(problem).splitlines()[0] if str(problem) else ''}"


def line(row: dict[str, Any]) -> str:
    """A row as a line of the printed table."""
    where = f"{row['kernel']:8} {row['N']:6} x {row['K']:6}  M {row['M']:5}  w{row['weight_bits']:<2}"
    share = 100 * row["floor_share"]
    return f"{where} {row['us']:9.2f} us  {row['speedup_vs_bf16']:5.2f}x bf16  {share:5.1f} % of the floor"


def headline(rows: list[dict[str, Any]], shapes: list[tuple[int, int]]) -> dict[str, float]:
    """The geometric mean over `shapes` of the speed-up over bf16 at one token, by kernel and width."""
    found = {}
    for kernel, bits in sorted({(r["kernel"], r["weight_bits"]) for r in rows if r["kernel"] != "bf16"}):
        ratios = [r["speedup_vs_bf16"] for r in rows if (r["kernel"], r["weight_bits"], r["M"]) == (kernel, bits, 1)
                  and (r["N"], r["K"]) in shapes and "error" not in r]  # fmt: skip
        if len(ratios) == len(shapes):
            found[f"{kernel} w{bits}"] = round(math.exp(sum(map(math.log, ratios)) / len(ratios)), 3)
    return found


# --- the sweep ----------------------------------------------------------------------------------


def few_candidates(text: str | None) -> list[Any]:
    """Settings to try; `text` as "row_tiles,warps,splits,ahead,stages,registers ..." names others."""
    from bitdial.kernels.triton.packed.linear import FewSettings

    if text is None:
        text = ("1,8,1,1,1,0 1,8,1,0,1,0 1,4,1,1,1,0 1,4,1,0,1,0 1,16,1,1,1,0 1,8,1,0,3,0 1,4,1,0,3,0 1,4,1,0,4,0 "
                "2,8,1,1,1,0 2,8,1,0,1,0 2,4,1,1,1,0 2,4,1,0,3,0 1,8,2,1,1,0 1,4,2,1,1,0 2,4,2,1,1,0 2,8,2,1,1,0 "
                "1,8,1,1,1,64 4,4,2,0,1,0 4,4,4,0,1,0 4,8,4,0,1,0")  # fmt: skip
    made = []
    for item in text.split():
        row_tiles, warps, splits, ahead, stages, registers = map(int, item.split(","))
        made.append(FewSettings(row_tiles, warps, splits, bool(ahead), stages, registers or None))
    return made


def compile_ahead(work: list[tuple[str, tuple[int, int], int, int, Any]], jobs: int) -> None:
    """Compile side by side into the caches on disk; one after the other it would take minutes."""
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(run_once, work))


def run_once(work: tuple[str, tuple[int, int], int, int, Any]) -> None:
    """Run one contender once; those that cannot run are named when they are measured."""
    name, shape, tokens, bits, settings = work
    device = torch.device("cuda")
    x = torch.zeros(tokens, shape[1], dtype=torch.bfloat16, device=device)
    with contextlib.suppress(Exception):
        if name in PEERS:
            layer = PEERS[name](torch.randn(shape, dtype=torch.bfloat16, device=device), bits)
        else:
            layer = with_settings(packed_weight(name, shape, bits, 0, device), bits, settings)
        if layer is not None:
            layer(x)


def sweep(bench: Bench, shape: tuple[int, int], tokens: int, bits: int, kind: str) -> dict[str, Any]:
    """The times of all settings at one shape, and the best."""
    candidates = few_candidates(bench.options.few)[: 2 if bench.options.tiny else None]
    x = bench.tokens(tokens, shape[1])
    weights = bench.weights(kind, shape, bits)
    exact = values(weights[0], bits)
    runs: dict[str, Callable[[], float]] = {"bf16": bench.timer("bf16", bench.bf16(shape), x)}
    failed = {}
    for settings in candidates:
        key = ",".join(str(int(part or 0)) for part in settings)
        try:
            layers = [with_settings(weight, bits, settings) for weight in weights]
            runs[key] = bench.timer(key, Contender(layers, exact, 0.02), x)
        except Exception as problem:  # too much shared memory, too few registers: not a setting for this GPU
            failed[key] = f"{type(problem).__name__}: {str(problem).splitlines()[0] if str(problem) else ''}"
    times = medians(runs, bench.options.rounds)
    floor = floor_bytes(shape, tokens, bits) / bench.speed
    base = times.pop("bf16")
    order = sorted(times, key=lambda key: times[key])
    print(f"{kind} {shape[0]} x {shape[1]}  M {tokens}  w{bits}  bf16 {base:.2f} us, floor {floor:.2f} us", flush=True)
    for key in order[:5]:
        print(
            f"    {key:16} {times[key]:8.2f} us  {base / times[key]:5.2f}x  {100 * floor / times[key]:5.1f} %",
            flush=True,
        )
    for key, reason in failed.items():
        print(f"    {key:16} {reason}", flush=True)
    return {"kernel": kind, "N": shape[0], "K": shape[1], "M": tokens, "weight_bits": bits, "bf16_us": base,
            "floor_us": floor, "us": {key: round(times[key], 3) for key in order}, "failed": failed}  # fmt: skip


def best_overall(found: list[dict[str, Any]]) -> None:
    """Print, for each width and number of tokens, the settings with the best geometric mean over the shapes."""
    for tokens, bits, kind in sorted({(f["M"], f["weight_bits"], f["kernel"]) for f in found}):
        group = [f for f in found if (f["M"], f["weight_bits"], f["kernel"]) == (tokens, bits, kind)]
        keys = set.intersection(*(set(f["us"]) for f in group))
        means = {key: math.prod(f["bf16_us"] / f["us"][key] for f in group) ** (1 / len(group)) for key in keys}
        top = sorted(means, key=lambda key: -means[key])[:4]
        print(f"best {kind} M {tokens} w{bits}: " + "   ".join(f"{key} {means[key]:.2f}x" for key in top), flush=True)


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
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--sweep", action="store_true", help="try settings of the kernel for up to 16 tokens instead")
    parser.add_argument("--few", help='settings to try: "row_tiles,warps,splits,ahead,stages,registers ..."')
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
        kinds = options.kernels
        if device.type == "cuda":
            work = [(kind, (64, 4096), m, bits, settings) for kind in kinds for m in tokens for bits in options.bits
                    if kind == "packed" or bits in BITS for settings in few_candidates(options.few)]  # fmt: skip
            compile_ahead(work, options.jobs)
        found: list[dict[str, Any]] = []
        for shape, m, bits, kind in itertools.product(shapes, tokens, options.bits, kinds):
            if kind == "packed" or bits in BITS:
                found.append(sweep(bench, shape, m, bits, kind))
                write_record("linear-sweep", options, script="linear", complete=False, **about, sweep=found)
        best_overall(found)
        write_record("linear-sweep", options, script="linear", **about, sweep=found)
        return
    if device.type == "cuda":
        names = [*options.kernels, *options.peers]
        compile_ahead([(n, s, m, b, None) for s in shapes for m in tokens for b in options.bits for n in names
                       if n != "nested" or b in BITS], options.jobs)  # fmt: skip
    rows: list[dict[str, Any]] = []
    for shape in shapes:
        for row in bench.rows(shape, tokens):
            rows.append(row)
            write_record("linear", options, complete=False, **about, headline=headline(rows, HEADLINE), rows=rows)
    means = headline(rows, HEADLINE)
    for name, value in means.items():
        print(f"geometric mean at M 1: {name} {value:.2f}x bf16")
    write_record("linear", options, **about, headline=means, rows=rows)


if __name__ == "__main__":
    main()
