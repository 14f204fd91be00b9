"""Two versions of bitdial against each other: the same benchmarks from two source trees, in turn, in one run.

    git worktree add /tmp/before 997216b
    python benchmarks/compare.py /tmp/before           # a table, and results/compare-h200.json (-cpu, -cuda)
    python benchmarks/compare.py /tmp/before --only train_step switch --repeats 3

Each benchmark runs as a process of its own with the sources of its tree: the older tree, then this one, and so on. A
row of one version meets the row of the other that says the same of itself: kernel, shape, bits. What a row measured is
the least over the repeats, since what disturbs a run only makes it slower. Ratios are new / old: below 1 is better.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from timing import ROOT, add_arguments, significant, write_record

MEASURED = ("us", "ms", "ms_per_step", "wall_ms", "peak_mib")
NAMES = ("kernel", "variant", "model", "network", "scheme", "first_and_last", "batch", "channels", "size", "outputs",
         "taps", "stride", "groups", "N", "K", "M", "bits", "weight_bits", "act_bits", "from", "to")  # fmt: skip
RENAMED = {"nested": "centred"}  # schemes, in trees before format version 2

# What is run, with options that both versions take.
BENCHMARKS: dict[str, list[str]] = {
    "train_step": ["--variants", "float", "joint"],
    "linear": ["--shapes", "8192x28672", "4096x4096", "--tokens", "1", "--peers", "--jobs", "16"],
    "conv": ["--networks", "resnet50", "--batches", "32", "--compile-ahead", "16"],
    "network": ["--networks", "resnet50", "--batches", "32", "1", "--no-compile"],
    "switch": [],
}

Key = tuple[Any, ...]
Found = dict[Key, dict[str, float]]


def measured(rows: Iterable[dict[str, Any]], renamed: dict[str, str]) -> Found:
    """What each row measured, by what it says of itself."""
    found: Found = {}
    for row in rows:
        values = {name: float(row[name]) for name in MEASURED if isinstance(row.get(name), int | float)}
        said = {**row, "scheme": renamed.get(row.get("scheme", ""), row.get("scheme"))}
        found[tuple(json.dumps(said.get(name)) for name in NAMES)] = values
    return found


def run(tree: Path, name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of benchmark `name` with the sources of `tree`."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        more = ["--smoke" if name == "train_step" else "--tiny"] if options.tiny else BENCHMARKS[name]
        command = [sys.executable, str(tree / "benchmarks" / f"{name}.py"), *more]
        command += ["--device", options.device, "--rounds", str(options.rounds), "--out", str(out)]
        ended = subprocess.run(
            command, cwd=tree, env={**os.environ, "PYTHONPATH": str(tree / "src")}, capture_output=True, text=True
        )
        if ended.returncode or not out.exists():
            raise SystemExit(f"{' '.join(command)} ended with {ended.returncode}:\n{ended.stderr[-2000:]}")
        return json.loads(out.read_text())["rows"]


def least(runs: list[Found]) -> Found:
    """The least of each number over the repeats."""
    keys = set.intersection(*(set(each) for each in runs))
    return {key: {name: min(each[key][name] for each in runs) for name in runs[0][key]} for key in keys}


def compared(benchmark: str, old: Found, new: Found) -> list[dict[str, Any]]:
    """A row for each number that both versions measured."""
    rows = []
    for key in sorted(set(old) & set(new)):
        said = {name: json.loads(value) for name, value in zip(NAMES, key, strict=True) if value != "null"}
        for name in set(old[key]) & set(new[key]):
            ratio = new[key][name] / old[key][name] if old[key][name] else math.nan
            both = {"old": old[key][name], "new": new[key][name], "ratio": significant(ratio)}
            rows.append({"benchmark": benchmark, **said, "of": name, **both})
    return rows


def summary(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """The geometric mean of the ratios, and the largest, by benchmark and by what was measured."""
    by_name: dict[str, list[float]] = {}
    for row in rows:
        if math.isfinite(row["ratio"]) and row["ratio"] > 0:
            by_name.setdefault(f"{row['benchmark']} {row['of']}", []).append(row["ratio"])
    return {
        name: {
            "mean": significant(math.exp(sum(map(math.log, ratios)) / len(ratios))),
            "largest": max(ratios),
            "rows": len(ratios),
        }
        for name, ratios in by_name.items()
    }


def main() -> None:
    """Run the benchmarks of both trees."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="the tree to compare with: a checkout of another version")
    parser.add_argument("--only", nargs="+", choices=list(BENCHMARKS), default=list(BENCHMARKS))
    parser.add_argument("--repeats", type=int, default=2)
    add_arguments(parser, rounds=5)
    options = parser.parse_args()
    old_tree = options.old.resolve()
    before = {} if (old_tree / "src" / "bitdial" / "nn" / "layer_kinds.py").exists() else RENAMED
    rows: list[dict[str, Any]] = []
    for name in options.only:
        olds, news = [], []
        for _ in range(options.repeats):
            olds.append(measured(run(old_tree, name, options), before))
            news.append(measured(run(ROOT, name, options), {}))
        rows += compared(name, least(olds), least(news))
        for what, figures in summary([row for row in rows if row["benchmark"] == name]).items():
            print(f"{what:24} new / old: {figures['mean']:.3f}, at most {figures['largest']:.3f}", flush=True)
        complete = name == options.only[-1]
        write_record("compare", options, complete=complete, summary=summary(rows), rows=rows)


if __name__ == "__main__":
    main()
