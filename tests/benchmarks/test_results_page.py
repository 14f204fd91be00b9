"""The results page: it is what the rows say, and the arithmetic behind it."""

import json
import random
import re
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
if str(BENCHMARKS) not in sys.path:
    sys.path.append(str(BENCHMARKS))

import result_rows  # noqa: E402 - found on the path above
import results_page as script  # noqa: E402


def row(seed: int = 0, top1: tuple[float, ...] = (92.0, 91.0, 90.0, 80.0), **changes: Any) -> dict[str, Any]:
    widths = changes.get("bit_choices", [8, 6, 4, 2])
    return {
        "scheme": "double_rounding",
        "alrs": "relative",
        "kd": "none",
        "start": "mse",
        "lr": 0.0005,
        "bit_choices": widths,
        "seed": seed,
        "epochs": 90,
        "split": "test",
        "float_top1": 92.5,
        "top1": {str(bits): value for bits, value in zip(widths, top1, strict=True)},
        "stopped": {},
        "epoch_seconds": 3.0,
        "stored_bits": widths[0],
        "device": "a device",
        "versions": {"torch": "2"},
        "command": f"bitdial train cifar10-resnet20 --seed {seed}",
    } | changes


def lines(text: str, start: str) -> list[list[str]]:
    """The cells of the table lines that begin with `start`."""
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith(start)
    ]


def section(page: str, title: str) -> str:
    """The part of the page from the heading that begins with `title` to the next one of its level or above."""
    level = len(title.split()[0])
    (found,) = [part for part in re.split(rf"^(?=#{{1,{level}}} )", page, flags=re.M) if part.startswith(title)]
    return found


def cell(text: str, start: str, column: str) -> list[str]:
    """The cells of a column, of the lines that begin with `start`; the columns are those of the first table."""
    place = lines(text, "|")[0].index(column)
    return [cells[place] for cells in lines(text, start)]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of results of its own, with a page beside it."""
    monkeypatch.setattr(script, "RESULTS", tmp_path)
    monkeypatch.setattr(script, "PAGE", tmp_path / "docs" / "results.md")
    (tmp_path / "docs").mkdir()
    return tmp_path


# --- the committed page -------------------------------------------------------------------------


def test_the_page_is_what_the_rows_say() -> None:
    assert script.PAGE.read_text(encoding="utf-8") == script.current_page(), "run python benchmarks/results_page.py"
    assert script.main(["--check"]) == 0


def test_check_notices_a_difference(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--check"]) == 1, "there is no page"
    assert script.main([]) == 0
    assert script.main(["--check"]) == 0
    changes = {
        "cifar10-resnet20.json": [row()],
        "cifar10-mobilenetv2.json": [row(model="mobilenetv2")],
        "train-step-h200.json": {"rows": [{"model": "resnet20", "variant": "joint", "ms_per_bitwidth": 2.0}]},
    }
    for name, content in changes.items():
        before = script.PAGE.read_bytes()
        (files / name).write_text(json.dumps(content))
        assert script.main(["--check"]) == 1, name
        assert "out of date" in capsys.readouterr().err
        assert script.PAGE.read_bytes() == before, "--check writes nothing"
        assert script.main([]) == 0
        assert script.main(["--check"]) == 0
    (files / "docs" / "figures").mkdir()
    (files / "docs" / "figures" / "convergence-resnet20-8642.png").touch()
    assert script.main(["--check"]) == 1, "a figure came"
    assert script.main([]) == 0
    script.PAGE.write_text(script.PAGE.read_text() + " ")
    assert script.main(["--check"]) == 1


# --- groups and cells ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([91.234], "91.23"),
        ([90.0, 92.0], "91.00 ± 1.41"),  # sqrt((1 + 1) / 1)
        ([1.0, 2.0, 3.0, 4.0], "2.50 ± 1.29"),  # sqrt((2.25 + 0.25 + 0.25 + 2.25) / 3)
        ([92.0, 92.0, 92.0], "92.00 ± 0.00"),
    ],
)
def test_mean_and_spread(values: list[float], expected: str) -> None:
    assert result_rows.mean(values) == expected


@pytest.mark.parametrize(("value", "expected"), [(0.256, "+0.26"), (-1.0, "-1.00"), (0.0, "+0.00"), (-0.001, "+0.00")])
def test_differences_have_a_sign(value: float, expected: str) -> None:
    assert result_rows.signed(value) == expected


def test_seeds_are_one_line_with_mean_spread_and_difference_to_the_paper() -> None:
    rows = [row(2, (92.0, 91.0, 90.0, 80.0)), row(0, (93.0, 91.0, 90.0, 83.0), float_top1=92.1),
            row(1, (94.0, 91.0, 90.0, 86.0), device="another", runs_at_once=3)]  # fmt: skip
    (cells,) = lines(script.make_page(rows), "| Double Rounding")
    assert cells == [
        "Double Rounding", "relative", "0.0005", "90", "3 (0, 1, 2)", "92.37 ± 0.23", "93.00 ± 1.00 (+0.75)",
        "91.00 ± 0.00 (-1.32)", "90.00 ± 0.00 (-2.09)", "83.00 ± 3.00 (-7.19)", "",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [{"scheme": "nested"}, {"alrs": "off"}, {"kd": "teacher"}, {"kd": "teacher", "teacher": "resnet56"},
     {"start": "lsq"}, {"lr": 1e-3}, {"epochs": 40}, {"split": "holdout"}, {"model": "mobilenetv2"},
     {"learn_scales": False}, {"float_epochs": 200}, {"batch": 128}, {"new_setting": 3}],
    ids=str,
)  # fmt: skip
def test_other_settings_are_other_lines(change: dict[str, Any]) -> None:
    rows = [row(0), row(1), row(2, **change)]
    assert sorted(len(one.runs) for one in script.group(rows)) == [1, 2]
    page = script.make_page(rows)
    assert page.count("| 2 (0, 1) |") >= 1
    assert page.count("| 1 (2) |") == 1
    assert "(0, 1, 2)" not in page


@pytest.mark.parametrize("same", [{"learn_scales": True}, {"model": "resnet20"}, {"runs_at_once": 2}, {"device": "x"}])
def test_a_default_that_is_spelt_out_and_outcomes_change_nothing(same: dict[str, Any]) -> None:
    without_split = {k: v for k, v in row(1).items() if k not in ("split", "start")}
    assert [len(one.runs) for one in script.group([row(0, **same), without_split])] == [2]


def test_a_setting_without_a_column_is_named() -> None:
    rows = [row(batch=128), row(new_setting=3, split="holdout")]
    found = [cells[0] for cells in lines(script.make_page(rows), "| Double Rounding")]
    assert found == ["Double Rounding, batch=128", "Double Rounding, new_setting=3"]


def test_a_seed_that_ran_twice_shows() -> None:
    assert "| 3 (0, 0, 1) |" in script.make_page([row(0), row(0), row(1)])


def test_the_order_of_rows_does_not_matter() -> None:
    rows = [row(s, scheme=k, epochs=e) for s in range(3) for k in ("nested", "lsq") for e in (40, 90)]
    page = script.make_page(rows)
    for seed in range(5):
        shuffled = rows.copy()
        random.Random(seed).shuffle(shuffled)
        assert script.make_page(shuffled) == page
    found = [(cells[0].split("`")[1], cells[4]) for cells in lines(page, "| `")]
    assert found == [("lsq", "90"), ("lsq", "40"), ("nested", "90"), ("nested", "40")]


# --- sections -----------------------------------------------------------------------------------

EVERYTHING = [
    row(0),
    row(0, (91.0, 90.0, 88.0), bit_choices=[4, 3, 2]),
    row(0, scheme="truncate"),
    row(0, scheme="lsq", stored_bits=32),
    row(0, scheme="nested"),
    row(0, scheme="nested", kd="teacher"),
    row(0, start="3std"),
    row(0, (90.0,), scheme="lsq", bit_choices=[2]),
    row(0, model="mobilenetv2"),
    row(0, split="holdout"),
]


def test_sections_in_the_order_of_what_matters() -> None:
    page = script.make_page(EVERYTHING, [{"model": "resnet20", "variant": "float", "ms_per_bitwidth": 1.0}])
    assert [line for line in page.splitlines() if line.startswith("## ")] == [
        "## 1. Double Rounding, with and without ALRS",
        "## 2. Rivals, and our nested scheme",
        "## 3. Distillation and components",
        "## 4. Dedicated models, and what joint training costs",
        "## MobileNetV2",
        "## Mixed precision",
        "## Speed",
        "## Held-out images: used for choices",
    ]
    for part in page.split("\n#")[1:]:
        assert len({len(cells) for cells in lines(part, "|")}) <= 1, "every line has every cell"
    assert page.endswith("\n")
    assert "\n\n\n" not in page


def test_every_row_is_shown() -> None:
    for number, one in enumerate(EVERYTHING):
        marked = one | {"seed": 77 + number, "epochs": 44 + number}
        assert f"| {44 + number} | 1 ({77 + number}) |" in script.make_page([marked])


def test_without_rows_each_section_says_so() -> None:
    page = script.make_page([])
    assert page.count("\nNo run yet.\n") == 9
    assert not lines(page, "|")
    for title in ("## 1.", "## 2.", "### Distillation", "### Components", "### Cost", "## MobileNetV2", "## Speed"):
        assert section(page, title).rstrip().endswith("No run yet.")
    assert section(script.make_page([row()]), "## 1.").count("No run yet.") == 1, "at 4, 3, 2"


def test_lines_stand_above_the_papers() -> None:
    rows = [row(0), row(0, alrs="literal"), row(0, alrs="off"), row(0, epochs=30), row(0, learn_scales=False)]
    first = section(section(script.make_page(rows), "## 1."), "### Widths 8")
    methods = list(zip(cell(first, "|", "method"), cell(first, "|", "ALRS"), cell(first, "|", "epochs"), strict=True))
    assert methods[2:8] == [
        ("Double Rounding", "relative", "90"),
        ("Double Rounding", "literal", "90"),
        ("Double Rounding", "relative", "30"),
        ("*paper:* Double Rounding", "on", "90"),
        ("Double Rounding", "off", "90"),
        ("*paper:* Double Rounding", "off", "90"),
    ]
    assert cell(first, "| Double Rounding", "2 bits") == [
        "80.00 (-10.19)", "80.00 (-10.19)", "80.00 (-10.19)", "80.00 (-9.67)", "80.00"
    ]  # fmt: skip
    assert cell(first, "| *paper:*", "float") == ["92.30", "92.30"]


def test_the_frozen_control_is_subtracted() -> None:
    rows = [
        row(0, (92.5, 91.0, 90.0, 83.0)),
        row(0, alrs="off"),
        row(0, learn_scales=False, alrs="off"),
        row(1, lr=0.1),
    ]
    first = section(script.make_page(rows), "## 1.")
    assert cell(first, "| Double Rounding, frozen", "ALRS") == [""]
    assert cell(first, "| · learned less frozen", "ALRS") == ["relative", "off"], "not at another learning rate"
    assert cell(first, "| · learned less frozen", "8 bits") == ["+0.50", "+0.00"]
    assert cell(first, "| · learned less frozen", "2 bits") == ["+3.00", "+0.00"]


@pytest.mark.parametrize(
    ("alrs", "stopped", "expected"),
    [
        ("literal", {"8": 1.0, "6": 1.0, "4": 0.996, "2": 1.0}, "100 %"),
        ("literal", {"8": 1.0, "6": 0.9, "4": 0.5, "2": 0.0}, "100 / 90 / 50 / 0 %"),
        ("relative", {}, ""),
        ("off", {"8": 0.0, "6": 0.0, "4": 0.0, "2": 0.0}, ""),
    ],
)
def test_share_of_steps_at_rate_0(alrs: str, stopped: dict[str, float], expected: str) -> None:
    page = script.make_page([row(alrs=alrs, stopped=stopped)])
    assert cell(section(page, "## 1."), "| Double", "rate 0") == [expected]


def test_the_papers_rivals_are_in_their_columns() -> None:
    second = section(script.make_page([row(0, scheme="truncate", alrs="off")]), "## 2.")
    assert cell(second, "| `truncate`", "2 bits") == ["80.00 (+41.81)"]
    found = dict(zip(cell(second, "| *paper:*", "method"), cell(second, "| *paper:*", "stored"), strict=True))
    assert found == {"*paper:* Bit-Mixer": "8", "*paper:* MultiQuant": "32"}
    assert cell(second, "| *paper:* Bit-Mixer", "2 bits") == ["59.08", "38.19"]
    assert cell(second, "| *paper:* MultiQuant", "8 bits") == ["92.04", "92.02"]


def test_distillation_and_components_against_their_base() -> None:
    better = (93.0, 91.0, 90.0, 81.5)
    rows = [
        row(0),
        row(0, scheme="nested"),
        row(0, better, scheme="nested", kd="teacher", teacher="resnet56"),
        row(0, better, scheme="nested", kd="in_place", distill_weight=0.5),
        row(0, better, start="3std"),
        row(0, better, update="accumulated", alrs="off"),
    ]
    page = script.make_page(rows)
    distilled, components = section(page, "### Distillation"), section(page, "### Components")
    found = zip(*(cell(distilled, "|", name)[2:] for name in ("method", "kd", "2 bits")), strict=True)
    assert list(found) == [
        ("`nested` (ours)", "none", "80.00"),
        ("· distill_weight=0.5", "in_place", "81.50 (+1.50)"),
        ("· distilled", "teacher (resnet56)", "81.50 (+1.50)"),
    ]
    found = zip(*(cell(components, "|", name)[2:] for name in ("method", "ALRS", "8 bits")), strict=True)
    assert list(found) == [
        ("Double Rounding", "relative", "92.00"),
        ("· start=3std", "relative", "93.00 (+1.00)"),
        ("Double Rounding, update=accumulated", "off", "93.00"),
    ], "the last has no base"


def test_short_bases_of_ablations_stand_only_beside_them() -> None:
    short = [row(0, epochs=30), row(0, epochs=30, start="3std"), row(0, epochs=30, scheme="nested")]
    short += [row(0, epochs=30, scheme="nested", kd="in_place"), row(0, epochs=20, scheme="lsq")]
    page = script.make_page([row(0), *short])
    assert cell(section(page, "## 1."), "| Double", "epochs") == ["90"]
    assert cell(section(page, "## 2."), "| `", "method") == ["`lsq` (MultiQuant)"], "it is the base of nothing"
    assert cell(section(page, "### Distillation"), "| ", "epochs")[2:] == ["30", "30"]
    assert cell(section(page, "### Components"), "| ", "epochs")[2:] == ["30", "30"]


def test_a_larger_teacher_is_named_with_its_accuracy() -> None:
    taught = {"kd": "teacher", "teacher": "resnet56", "alrs": "off"}
    rows = [row(0, alrs="off"), row(0, **taught, teacher_top1=93.5), row(1, **taught, teacher_top1=93.7)]
    found = section(script.make_page(rows), "### Distillation")
    assert "teacher (resnet56, 93.60 ± 0.14)" in found
    shared = {**taught, "teacher_seed": 4, "teacher_top1": 93.5}
    found = section(script.make_page([row(0, alrs="off"), row(0, **shared), row(1, **shared)]), "### Distillation")
    assert "teacher (resnet56 of seed 4, 93.50) |" in found


def test_dedicated_models_beside_joint_ones() -> None:
    one = {"scheme": "lsq", "bit_choices": [2]}
    rows = [row(0), row(1, (92.0, 91.0, 90.0, 82.0)), row(0, (80.5,), **one), row(0, (70.0,), epochs=30, **one)]
    found = section(script.make_page(rows), "## 4.")
    assert cell(found, "| 2 |", "dedicated") == ["80.50", "70.00"]
    assert cell(found, "| 2 |", "jointly, 8, 6, 4, 2") == ["81.00 ± 1.41 (+0.50)", ""], "only at the same epochs"
    assert cell(found, "| 2 |", "method") == ["LSQ", "LSQ"]


def test_cost_is_joint_against_the_sum_of_separate_steps() -> None:
    cost = [{"bit_choices": [8, 6, 4, 2], "joint_epoch_s": 3.0, "separate_epoch_s": 4.0}]
    (cells,) = lines(section(script.make_page([row(0)], cost=cost), "### Cost"), "| 8, 6, 4, 2")
    assert cells == ["8, 6, 4, 2", "270.0 s", "360.0 s", "25.0 %", "11.1 % (12.5 %)"]
    assert "No run yet" in section(script.make_page([row(0)]), "### Cost")


def test_the_flagship_against_target_and_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = {"scheme": "nested", "kd": "teacher", "teacher": "resnet56", "lr": 0.002}
    rows = [row(s, (93.5, 93.0, 92.5, 91.0), **recipe) for s in range(3)]
    rows += [row(0, **recipe | {"lr": 0.001}), row(0, **recipe, epochs=30), row(0, **recipe, ties="up")]
    rows += [row(0, **recipe, split="holdout")]
    monkeypatch.setattr(script, "FLAGSHIP", {})
    assert "Flagship" not in script.make_page(rows), "no recipe is chosen"
    monkeypatch.setattr(script, "FLAGSHIP", recipe | {"alrs": "off"})
    assert "Flagship" not in script.make_page(rows), "no row of it"
    monkeypatch.setattr(script, "FLAGSHIP", recipe | {"alrs": "relative", "start": "mse"})
    found = section(script.make_page(rows), "## 5.")
    assert cell(found, "| `nested`", "runs (seeds)") == ["3 (0, 1, 2)"]
    columns = ("8 bits", "6 bits", "4 bits", "2 bits")
    assert [cell(found, "| · target", name)[0] for name in columns] == [
        "93.00 (+0.50)", "93.00 (+0.00)", "92.80 (-0.30)", "91.00 (+0.00)"
    ]  # fmt: skip
    assert cell(found, "| · *paper*", "2 bits") == ["90.19 (+0.81)"]


def test_mobilenet_shows_the_loss_at_2_bits() -> None:
    found = section(script.make_page([row(model="mobilenetv2")]), "## MobileNetV2")
    assert cell(found, "| Double Rounding", "4 to 2 bits") == ["-10.00"]
    assert cell(found, "| *paper:*", "4 to 2 bits") == ["-18.34", "-23.08", "-16.79"]


def test_speed_rows_are_a_table() -> None:
    rows = [
        {"model": "resnet20", "variant": "joint", "ms_per_bitwidth": 3.456, "time_vs_float": 1.2, "memory_vs_float": 1},
        {"model": "resnet50", "variant": "peer", "error": "out of memory"},
    ]
    found = section(script.make_page([], rows), "## Speed")
    assert lines(found, "| resnet") == [
        ["resnet20", "joint", "3.46", "1.20", "1.00"],
        ["resnet50", "peer (failed)", "", "", ""],
    ]


def test_held_out_runs_stay_apart() -> None:
    page = script.make_page([row(0), row(1, split="holdout"), row(2, split="holdout", model="mobilenetv2")])
    found = section(page, "## Held-out images: used for choices")
    assert [line for line in found.splitlines() if line.startswith("###")] == [
        "### ResNet20, widths 8, 6, 4, 2: held-out images",
        "### MobileNetV2, widths 8, 6, 4, 2: held-out images",
    ]
    assert "paper" not in found
    assert "(1)" not in page.replace(found, "")


def test_figures_are_linked_in_their_section() -> None:
    names = ["scale-gradients-act-resnet20-8642.png", "accuracy-resnet20-432.png", "other.png"]
    page = script.make_page([], figures=names)
    assert section(page, "## 1.").count("](figures/scale-gradients-act-resnet20-8642.png)") == 1
    assert section(page, "## 2.").count("](figures/accuracy-resnet20-432.png)") == 1
    assert page.count("](figures/") == 2, "and no others"


# --- wrong files --------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [None, "", "\n", "[]"])
def test_no_rows_are_no_error(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "rows.json"
    if content is not None:
        path.write_text(content)
    assert result_rows.read_rows(path) == []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "not JSON"),
        ("{}", "not a list"),
        ("[3]", "row 0: lacks all fields"),
        (json.dumps([row(), {k: v for k, v in row().items() if k != "command"}]), "row 1: lacks ['command']"),
        (json.dumps([row() | {"top1": {"8": 1.0}}]), "row 0: the widths of top1"),
        (json.dumps([row(split="train")]), "split 'train' is neither"),
    ],
)
@pytest.mark.parametrize("name", script.ROWS)
def test_wrong_rows_are_refused(files: Path, capsys, name: str, content: str, words: str) -> None:
    (files / name).write_text(content)
    assert script.main([]) == 1
    error = capsys.readouterr().err
    assert words in error
    assert name in error
    assert not script.PAGE.exists()


@pytest.mark.parametrize("content", ["[]", "{}", '{"rows": 3}', "{"])
def test_wrong_speed_rows_are_refused(files: Path, capsys, content: str) -> None:
    (files / "train-step-h200.json").write_text(content)
    assert script.main([]) == 1
    assert "train-step-h200.json" in capsys.readouterr().err
