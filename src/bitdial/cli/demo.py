"""The command `bitdial demo`."""

import argparse
import time

from bitdial.cli.mixed import show_correlation
from bitdial.cli.places import writing
from bitdial.cli.tables import number, percent, show_table
from bitdial.demos.mixed import LABELS, run_mixed_demo
from bitdial.demos.uniform import run_demo


def run(options: argparse.Namespace) -> None:
    """Run the demo and show what it found."""
    name = "mixed" if options.mixed else "demo"
    with writing(options, {"--out": options.out / f"{name}.html"}):
        (_mixed_demo if options.mixed else _uniform_demo)(options)


def _uniform_demo(options: argparse.Namespace) -> None:
    print("Training a small residual network on handwritten digits: float first, then 8, 6, 4 and 2 bits jointly.")
    began = time.monotonic()
    outcome = run_demo(options.out)
    result = outcome.result
    size = result["bytes"]
    rows = [["float", f"{100 * result['float_top1']:.1f} %", "", f"{size['float']:,}", "", ""]]
    for bits, top1 in result["top1"].items():
        rows.append(
            [
                f"{bits} bits",
                f"{100 * top1:.1f} %",
                f"{100 * (top1 - result['float_top1']):+.1f}",
                f"{size['separate'][bits]:,}",
                "identical" if outcome.identical_logits[int(bits)] else "DIFFERENT",
                f"{100 * outcome.exact_agreement[int(bits)]:.1f} %",
            ]
        )
    show_table(
        "One training, one file",
        ["setting", "accuracy", "to float", "bytes if alone", "reloaded logits", "code-exact argmax"],
        rows,
    )
    separate = sum(size["separate"].values())
    print(
        f"One file for all widths: {size['artifact']:,} bytes. Separate files: {separate:,} bytes together "
        f"({separate / size['artifact']:.1f}x). Float: {size['float']:,} bytes."
    )
    print(
        f"Saved {options.out / result['artifact']}, reloaded it and switched it live, in "
        f"{time.monotonic() - began:.0f} s. Figures: {outcome.page}"
    )


def _mixed_demo(options: argparse.Namespace) -> None:
    began = time.monotonic()
    outcome = run_mixed_demo(options.out, tell=print)
    result = outcome.result
    rows = [
        [
            name,
            percent(plan["held_out"]),
            percent(plan["test"]),
            number(plan["average_bits"]),
            number(plan["bytes"]),
            number(plan["bitops"]),
        ]
        for name, plan in result["plans"].items()
    ]
    for one in outcome.front.uniform:
        top1 = percent(result["top1"]["hasb"][str(one.uniform_width)])
        costs = [number(one.costs[quantity]) for quantity in ("average_bits", "bytes", "bitops")]
        rows.append([one.uniform_name, percent(one.accuracy), top1, *costs])
    columns = ["setting", "held-out accuracy", "test accuracy", "average bits", "bytes if alone", "BitOps"]
    show_table("One file, a plan for each budget", columns, rows)
    show_correlation(outcome.front)
    means = ", ".join(f"{LABELS[name]} {percent(value)}" for name, value in result["mean_held_out"].items())
    print(f"Best held-out accuracy, averaged over budgets from 2 to 4 bits: {means}")
    print(
        f"Saved {outcome.artifact} ({result['bytes']:,} bytes), reloaded it and switched it live to "
        f"{len(outcome.front.plans)} stored plans by name, with the trained model's logits at each, in "
        f"{time.monotonic() - began:.0f} s. Page: {outcome.page}"
    )
