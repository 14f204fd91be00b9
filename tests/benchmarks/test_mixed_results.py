"""Mixed precision on the results page: the arithmetic of its tables, on rows made up here."""

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
if str(BENCHMARKS) not in sys.path:
    sys.path.append(str(BENCHMARKS))

import mixed_results  # noqa: E402 - found on the path above
import results_page  # noqa: E402
from result_rows import WrongRows  # noqa: E402

BUDGETS = (2.0, 2.5, 3.0, 3.5, 4.0)


def run(
    seed: int = 0,
    top1: tuple[float, ...] = (89.0, 90.0, 91.0, 91.5, 92.0),
    uniform: tuple[float, ...] = (92.0, 90.5, 89.0),
    start: tuple[float, ...] = (92.0, 91.0, 89.5),
    **changes: Any,
) -> list[dict[str, Any]]:
    """The rows of one run: plans that use their budget up, but for that of 3.5 bits."""
    widths = changes.get("bit_choices", [4, 3, 2])
    low, high = widths[-1], widths[0]
    rows = []
    for number, (place, value) in enumerate(zip(BUDGETS, top1, strict=True)):
        budget = low + (high - low) * (place - 2) / 2
        rows.append({
            "sampling": "hasb", "scheme": "double_rounding", "bit_choices": widths, "seed": seed, "epochs": 90,
            "lr": 1e-4, "alrs": "relative", "split": "test", "budget": budget,
            "average_bits": budget - (0.25 if place == 3.5 else 0), "plan": {"conv": high}, "top1": value,
            "uniform_top1": {str(b): v for b, v in zip(widths, uniform, strict=True)},
            "start_top1": {str(b): v for b, v in zip(widths, start, strict=True)},
            "predicted_loss": 5.0 - number, "bytes": 100, "bitops": 100, "epoch_seconds": 1.0, "device": "a device",
            "versions": {}, "command": "bitdial train cifar10-resnet20-mixed",
        } | changes)  # fmt: skip
    return rows


def cells(text: str, start: str) -> list[list[str]]:
    """The cells of the table lines that begin with `start`."""
    return [[c.strip() for c in line.strip("|").split("|")] for line in text.splitlines() if line.startswith(start)]


def test_no_rows_no_run_yet() -> None:
    page = results_page.make_page([])
    assert "No run yet." in page[page.index("## Mixed precision") : page.index("## Speed")]


def test_a_line_has_plans_the_front_and_the_order() -> None:
    text = mixed_results.section(run() + run(1, (88.0, 90.0, 92.0, 91.0, 92.0)))
    assert text.startswith("### ResNet20, mixed, widths 4, 3, 2\n")
    (line,) = cells(text, "| HASB | 0.0001 | 90 | 2 (0, 1) | 90.00")
    # Fronts: 89 to 2.5, 90 to 3, 91 to 3.25, 91.5 to 4; and 88, 90, 92 to the end, where 3.25 bits are beaten.
    first = (0.5 * 89 + 0.5 * 90 + 0.25 * 91 + 0.75 * 91.5) / 2
    second = (0.5 * 88 + 0.5 * 90 + 1.0 * 92) / 2
    assert [f"{first:.2f}", f"{second:.2f}"] == ["90.44", "90.50"]
    assert line[4:8] == ["90.00 ± 0.00", "91.50 ± 0.71", "91.25 ± 0.35", "90.47 ± 0.04"]
    # Ranks of the second: 88, 90, 91, and 92 twice, against 1 to 5.
    ranks, place = [1, 2, 4.5, 3, 4.5], [5, 4, 3, 2, 1]
    top = sum((a - 3) * (b - 3) for a, b in zip(ranks, place, strict=True))
    bottom = (sum((a - 3) ** 2 for a in ranks) * 10) ** 0.5
    assert line[8] == f"{(-1 + top / bottom) / 2:.2f} ± {abs(-1 - top / bottom) / 2**0.5:.2f}"
    (start,) = cells(text, "| · start, uniform")
    assert start[4:7] == ["", "91.00 ± 0.00", ""], "3 bits is the only width among the budgets"
    (uniform,) = [line for line in cells(text, "| HASB | 0.0001") if "(-0.50)" in line[-1]]
    assert uniform[4:] == ["92.00 ± 0.00 (+0.00)", "90.50 ± 0.00 (-0.50)", "89.00 ± 0.00 (-0.50)"]


def test_targets_are_differences_within_a_seed() -> None:
    rows = run() + run(1, (89.0, 90.0, 91.2, 91.5, 92.0), start=(92.0, 90.2, 89.0)) + run(sampling="random")
    rows += run(1, (89.0, 90.0, 90.4, 91.5, 92.0), sampling="random") + run(2, sampling="random")
    found = {line[2].split(":")[0]: line[3:] for line in cells(mixed_results.section(rows), "| HASB | 90 |")}
    assert found == {
        "plan of 3 bits less uniform 3 bits": ["2", "+0.60", "yes"],
        "plan of 3 bits less the start's 3 bits": ["2", "+0.50", "yes"],
        "uniform 4 bits less the start's": ["2", "+0.00", "yes"],
        "uniform 3 bits less the start's": ["2", "-0.10", "yes"],
        "uniform 2 bits less the start's": ["2", "-0.25", "yes"],
        "HASB's front less that of random sampling": ["2", "+0.05", "yes"],  # 0.8 over an eighth, in one of two
    }


@pytest.mark.parametrize(
    ("changes", "target"),
    [
        ({"uniform": (92.0, 90.8, 89.5)}, "plan of 3 bits less uniform"),
        ({"start": (92.0, 91.1, 89.5)}, "plan of 3 bits less the start's"),
        ({"uniform": (91.69, 90.5, 89.5)}, "uniform 4 bits"),
        ({}, "HASB's front"),  # as high as that of random sampling
    ],
)
def test_a_target_can_be_missed_by_a_little(changes: dict[str, Any], target: str) -> None:
    text = mixed_results.section(run(**changes) + run(sampling="random"))
    assert [line[5] for line in cells(text, "| HASB | 90 |") if line[2].startswith(target)] == ["no"]


def test_targets_that_were_not_measured_and_widths_without_any() -> None:
    alone = cells(mixed_results.section(run()), "| HASB | 90 |")
    assert alone[-1][3:] == ["0", "", ""], "nothing to compare the front with"
    widths = [8, 6, 4, 2]
    tops = {"uniform": (92.0, 91.0, 90.0, 88.0), "start": (92.0, 91.0, 90.0, 88.0)}
    text = mixed_results.section(run(bit_choices=widths, **tops))
    assert "target" not in text
    assert "| 3 bits | 3.5 bits | 4 bits | 5 bits | 6 bits | 6.5 bits |" in text
    (line, _) = cells(text, "| HASB")
    assert line[4:10] == ["", "90.00", "", "91.00", "", "91.50"], "no plan was searched for at 3, 4 and 6 bits"


def test_settings_keep_runs_apart_and_the_order_of_rows_does_not_matter() -> None:
    rows = [*run(), *run(sampling="random"), *run(transitions="statistics"), *run(transitions="full", seed=1)]
    rows += [*run(epochs=30), *run(split="holdout"), *run(model="mobilenetv2", sigma=0.2)]
    text = mixed_results.section(rows)
    random.Random(0).shuffle(rows)
    assert mixed_results.section(rows) == text
    labels = [line[0] for line in cells(text, "| HASB")]
    assert "HASB, transitions=statistics" in labels
    assert text.count("sigma=0.2") == text.count("All runs: sigma=0.2.") == 1, "what all runs share is said once"
    text = mixed_results.section(rows + run(model="mobilenetv2", sigma=0.3))
    assert {"HASB, sigma=0.2", "HASB, sigma=0.3"} <= {line[0] for line in cells(text, "| HASB")}
    assert "All runs" not in text
    titles = [line for line in text.splitlines() if line.startswith("###")]
    assert titles == [
        "### ResNet20, mixed, widths 4, 3, 2",
        "### MobileNetV2, mixed, widths 4, 3, 2",
        "### ResNet20, held-out images, widths 4, 3, 2",
    ]


def test_the_page_reads_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results_page, "RESULTS", tmp_path)
    monkeypatch.setattr(results_page, "PAGE", tmp_path / "docs" / "results.md")
    before = results_page.current_page()
    (tmp_path / "cifar10-resnet20-mixed.json").write_text(json.dumps(run()))
    page = results_page.current_page()
    assert page == results_page.make_page([], mixed=run()) != before
    linked = results_page.make_page([], figures=["front-resnet20-432.png"], mixed=run())
    assert "(figures/front-resnet20-432.png)" in linked[linked.index("## Mixed precision") : linked.index("## Speed")]


def test_rows_that_are_wrong(tmp_path: Path) -> None:
    (one, *_) = run()
    path = tmp_path / "mixed.json"
    wrong: list[tuple[object, str]] = [
        ({}, "not a list"), ([3], "lacks all fields"), ([{k: v for k, v in one.items() if k != "plan"}], "'plan'"),
        ([one | {"uniform_top1": {"4": 90.0}}], "are not those of bit_choices"),
        ([one | {"model": "vgg"}], "model or split"), ([one | {"split": "train"}], "model or split"),
    ]  # fmt: skip
    for content, problem in wrong:
        path.write_text(json.dumps(content))
        with pytest.raises(WrongRows, match=problem):
            mixed_results.read_rows(path)
    with pytest.raises(WrongRows, match=r"two rows of seed 0 .* the budget 2 in common"):
        mixed_results.section([*run(), one])
    with pytest.raises(WrongRows, match="no plan within 2 bits"):
        mixed_results.section(run()[1:])


def test_figures_of_the_fronts() -> None:
    pytest.importorskip("matplotlib")
    import figures

    rows = run() + run(1, (88.0, 90.0, 92.0, 91.0, 92.0)) + run(sampling="random") + run(epochs=30)
    rows += run(split="holdout") + run(model="mobilenetv2") + run(model="mobilenetv2", transitions="statistics")
    found = figures.comparable(mixed_results.group(rows))
    assert {name: [(one.get("sampling"), one.get("epochs")) for one in each] for name, each in found.items()} == {
        "resnet20-432": [("hasb", 90), ("random", 90)],
        "mobilenetv2-432": [("hasb", 90), ("hasb", 90)],
    }
    (ax,) = figures.fronts(found["resnet20-432"]).axes
    hasb, drawn, *starts = ax.lines
    assert list(hasb.get_xdata()) == list(BUDGETS)
    assert list(hasb.get_ydata()) == [88.5, 90.0, 91.5, 91.75, 92.0], (
        "the second run falls back at 3.5 bits; its front does not"
    )
    assert list(drawn.get_ydata()) == [89.0, 90.0, 91.0, 91.5, 92.0]
    assert [(line.get_xdata()[0], line.get_ydata()[0]) for line in starts] == [(4, 92.0), (3, 91.0), (2, 89.5)]
    assert [text.get_text() for text in ax.get_legend().get_texts()][:2] == ["HASB", "random sampling"]
