"""The results page: it is what the rows say, and the arithmetic behind it."""

import importlib.util
import json
import random
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("results_page", ROOT / "benchmarks" / "results_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


script = load_script()


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


# --- the committed page -------------------------------------------------------------------------


def test_the_page_is_what_the_rows_say() -> None:
    assert script.PAGE.read_text(encoding="utf-8") == script.make_page(script.read_rows(script.ROWS)), (
        "run python benchmarks/results_page.py"
    )
    assert script.main(["--check"]) == 0


def test_check_notices_a_difference(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(script, "ROWS", tmp_path / "rows.json")
    monkeypatch.setattr(script, "PAGE", tmp_path / "results.md")
    assert script.main(["--check"]) == 1, "there is no page"
    assert script.main([]) == 0
    assert script.main(["--check"]) == 0
    before = script.PAGE.read_bytes()
    (tmp_path / "rows.json").write_text(json.dumps([row()]))
    assert script.main(["--check"]) == 1
    assert "out of date" in capsys.readouterr().err
    assert script.PAGE.read_bytes() == before, "--check writes nothing"
    assert script.main([]) == 0
    assert script.main(["--check"]) == 0
    script.PAGE.write_text(script.PAGE.read_text() + " ")
    assert script.main(["--check"]) == 1


# --- means --------------------------------------------------------------------------------------


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
    assert script.mean(values) == expected


def test_seeds_are_one_line_with_mean_and_spread() -> None:
    rows = [row(2, (92.0, 91.0, 90.0, 80.0), epoch_seconds=9.0), row(0, (93.0, 91.0, 90.0, 83.0), float_top1=92.1),
            row(1, (94.0, 91.0, 90.0, 86.0), device="another")]  # fmt: skip
    (cells,) = lines(script.make_page(rows), "| `double_rounding`")
    assert cells == [
        "`double_rounding`", "8", "relative", "none", "mse", "0.0005", "90", "3 (0, 1, 2)", "92.37 ± 0.23",
        "93.00 ± 1.00", "91.00 ± 0.00", "90.00 ± 0.00", "83.00 ± 3.00", "3.0", "a device, another",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [{"scheme": "nested"}, {"alrs": "off"}, {"kd": "teacher"}, {"start": "lsq"}, {"lr": 1e-3}, {"epochs": 40},
     {"split": "holdout"}, {"new_setting": 3}],
    ids=str,
)  # fmt: skip
def test_other_settings_are_other_lines(change: dict[str, Any]) -> None:
    assert [len(runs) for runs in script.group([row(0), row(1), row(2, **change)])] in ([2, 1], [1, 2])
    page = script.make_page([row(0), row(1), row(2, **change)])
    assert [cells[7] for cells in lines(page, "| `")] in (["2 (0, 1)", "1 (2)"], ["1 (2)", "2 (0, 1)"])


def test_a_setting_without_a_column_is_named() -> None:
    assert lines(script.make_page([row(new_setting=3)]), "| `")[0][0] == "`double_rounding`, new_setting=3"


def test_a_seed_that_ran_twice_shows() -> None:
    (cells,) = lines(script.make_page([row(0), row(0), row(1)]), "| `")
    assert cells[7] == "3 (0, 0, 1)"


# --- tables -------------------------------------------------------------------------------------


def test_tables_by_widths_and_split() -> None:
    three = (91.0, 90.0, 88.0)
    rows = [
        row(0, split="holdout"),
        row(0, three, bit_choices=[4, 3, 2]),
        row(0),
        row(0, scheme="lsq", stored_bits=32),
        row(0, (90.0, 80.0), bit_choices=[4, 2]),
        row(0, three, bit_choices=[4, 3, 2], split="holdout"),
    ]
    page = script.make_page(rows)
    headings = [line for line in page.splitlines() if line.startswith("##")]
    assert headings == [
        "## Widths 8, 6, 4, 2: the test set",
        "## Widths 4, 3, 2: the test set",
        "## Widths 4, 2: the test set",
        "## Held-out images: used for choices",
        "### Widths 8, 6, 4, 2: held-out images",
        "### Widths 4, 3, 2: held-out images",
    ]
    sections = dict(zip(headings, page.split("\n##")[1:], strict=True))
    first = sections[headings[0]]
    assert [cells[:2] for cells in lines(first, "| `")] == [["`double_rounding`", "8"], ["`lsq`", "32"]]
    assert len(lines(first, "| *paper:*")) == 6
    assert len(lines(sections[headings[1]], "| *paper:*")) == 2
    for heading in headings[2:]:
        assert "paper:" not in sections[heading], "the paper has no such numbers"
    for section in sections.values():
        assert len({len(cells) for cells in lines(section, "|")}) <= 1, "every line has every cell"


def test_the_papers_numbers_are_in_their_columns() -> None:
    page = script.make_page([])
    found = {(cells[0], cells[2], len(cells)): cells[8:-2] for cells in lines(page, "| *paper:*")}
    assert found["*paper:* Double Rounding", "on", 15] == ["92.30", "92.25", "92.32", "92.09", "90.19"]
    assert found["*paper:* Double Rounding", "off", 14] == ["92.30", "91.19", "90.98", "88.62"]
    assert found["*paper:* Bit-Mixer", "off", 15] == ["92.30", "91.84", "91.89", "91.34", "38.19"]
    assert len(found) == 8


@pytest.mark.parametrize("content", [None, "", "\n", "[]"])
def test_no_rows_is_said(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "rows.json"
    if content is not None:
        path.write_text(content)
    assert script.read_rows(path) == []
    assert "There are no results yet" in script.make_page([])
    assert "There are no results yet" not in script.make_page([row()])
    assert script.make_page([row()]).count("No run of ours yet") == 1, "at 4, 3, 2"


def test_the_order_of_rows_does_not_matter() -> None:
    rows = [row(s, scheme=k, epochs=e) for s in range(3) for k in ("nested", "double_rounding") for e in (40, 90)]
    page = script.make_page(rows)
    for seed in range(5):
        shuffled = rows.copy()
        random.Random(seed).shuffle(shuffled)
        assert script.make_page(shuffled) == page
    assert [(cells[0], cells[6]) for cells in lines(page, "| `")] == [
        ("`double_rounding`", "90"), ("`double_rounding`", "40"), ("`nested`", "90"), ("`nested`", "40")
    ]  # fmt: skip


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
def test_wrong_rows_are_refused(tmp_path: Path, monkeypatch, capsys, content: str, words: str) -> None:
    monkeypatch.setattr(script, "ROWS", tmp_path / "rows.json")
    monkeypatch.setattr(script, "PAGE", tmp_path / "results.md")
    script.ROWS.write_text(content)
    assert script.main([]) == 1
    assert words in capsys.readouterr().err
    assert not script.PAGE.exists()
