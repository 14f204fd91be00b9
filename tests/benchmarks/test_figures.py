"""The figures of the results page: what they are drawn from, and what they show."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
if str(BENCHMARKS) not in sys.path:
    sys.path.append(str(BENCHMARKS))

import figures  # noqa: E402 - found on the path above
import result_rows  # noqa: E402

LAYERS = ["stem", "layer1.0.conv1"]


def row(alrs: str = "relative", **changes: Any) -> dict[str, Any]:
    widths = changes.get("bit_choices", [8, 2])
    return {
        "scheme": "double_rounding", "alrs": alrs, "kd": "none", "start": "mse", "lr": 0.001, "bit_choices": widths,
        "seed": 0, "epochs": 2, "split": "test", "float_top1": 92.5, "top1": {str(b): 90.0 + b / 10 for b in widths},
        "stopped": {}, "epoch_seconds": 1.0, "stored_bits": widths[0], "device": "a device", "versions": {},
        "command": "bitdial train",
    } | changes  # fmt: skip


def history(alrs: str, evaluated: bool = True, **changes: Any) -> dict[str, Any]:
    """Two epochs, three samples; the first layer has no activation scale."""
    settings = row(alrs, **changes)
    rows = [{"epoch": e, "train_top1": {"8": 0.5, "2": 0.25}, "top1": {"8": 0.8 + e / 10, "2": 0.6}} for e in (0, 1)]
    if not evaluated:
        rows = [{k: v for k, v in one.items() if k != "top1"} for one in rows]
    samples = [{"step": n, "weight": [10.0**-n, 0.01], "act": [0.0, 0.1 * (n + 1)]} for n in range(3)]
    return {"settings": settings, "layers": LAYERS, "rows": rows, "gradients": {"8": samples, "2": samples}}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where results lie and figures go."""
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    monkeypatch.setattr(figures, "FOLDER", tmp_path / "figures")
    return tmp_path


def fill(folder: Path) -> None:
    for alrs in ("off", "relative"):
        (folder / f"history-{alrs}.json").write_text(json.dumps(history(alrs)))
    rows = [row(), row(seed=1), row("off"), row(bit_choices=[8, 6, 4, 2]), row(split="holdout", bit_choices=[4, 2])]
    (folder / "cifar10-resnet20.json").write_text(json.dumps(rows))


def test_files_become_figures_and_always_the_same(folder: Path) -> None:
    fill(folder)
    assert figures.main() == 0
    found = {path.name: path.read_bytes() for path in (folder / "figures").iterdir()}
    assert sorted(found) == [
        "accuracy-resnet20-82.png",
        "accuracy-resnet20-8642.png",
        "convergence-resnet20-82.png",
        "scale-gradients-act-resnet20-82.png",
        "scale-gradients-weight-resnet20-82.png",
    ]
    assert all(data.startswith(b"\x89PNG") and len(data) < 150_000 for data in found.values())
    assert figures.main() == 0
    assert {path.name: path.read_bytes() for path in (folder / "figures").iterdir()} == found


def test_without_data_nothing_is_drawn(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert figures.main() == 0
    assert "Nothing to draw" in capsys.readouterr().out
    assert not (folder / "figures").exists()


@pytest.mark.parametrize("content", ["[]", "{}", json.dumps({"settings": {}, "layers": [], "rows": []}), "{"])
def test_a_file_that_is_no_history_is_refused(folder: Path, capsys, content: str) -> None:
    (folder / "history-off.json").write_text(content)
    assert figures.main() == 1
    assert "history-off.json is no" in capsys.readouterr().err


def test_runs_are_compared_that_differ_only_by_alrs() -> None:
    runs = [
        history("relative", seed=1),
        history("relative"),
        history("off"),
        history("literal"),
        history("off", epochs=1),
        history("relative", epochs=1),
        history("off", lr=0.1, epochs=9),
        history("relative", bit_choices=[4, 2]),
        history("off", bit_choices=[4, 3, 2], scheme="nested"),
        history("relative", bit_choices=[4, 3, 2], scheme="nested"),
        history("off", model="mobilenetv2"),
        history("relative", model="mobilenetv2"),
    ]
    found = figures.compare_alrs(runs)
    assert set(found) == {"resnet20-82", "resnet20-432", "mobilenetv2-82"}
    assert [(run["settings"]["alrs"], run["settings"]["seed"]) for run in found["resnet20-82"]] == [
        ("off", 0), ("relative", 0), ("literal", 0)
    ]  # fmt: skip
    assert figures.compare_alrs(reversed(runs)) == found
    assert figures.compare_alrs([history("relative"), history("literal")]) == {}, "nothing without ALRS"


def test_convergence_shows_each_width_in_panels_of_one_scale() -> None:
    figure = figures.convergence([history("off"), history("relative")])
    first, second = figure.axes
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["without ALRS", "with ALRS (relative)"]
    assert first.get_ylim() == second.get_ylim()
    assert [list(line.get_ydata()) for line in first.lines] == [[80, 90], [60, 60]]
    assert list(first.lines[0].get_xdata()) == [1, 2]
    assert [text.get_text() for text in first.get_legend().get_texts()] == ["8 bits: 90.0 %", "2 bits: 60.0 %"]


def test_convergence_without_evaluation_is_of_training_accuracy() -> None:
    figure = figures.convergence([history("off"), history("relative", evaluated=False)])
    assert figure.axes[0].get_ylabel() == "training accuracy (%)"
    assert list(figure.axes[0].lines[0].get_ydata()) == [50, 50]


def test_scale_gradients_show_medians_of_what_is_above_zero() -> None:
    runs = [history("off"), history("relative")]
    weights, acts = (figures.scale_gradients(runs, which) for which in ("weight", "act"))
    assert weights.axes[0].get_ylim() == weights.axes[1].get_ylim()
    assert weights.axes[0].get_yscale() == "log"
    assert list(weights.axes[0].lines[0].get_ydata()) == pytest.approx([0.1, 0.01])
    assert list(acts.axes[0].lines[0].get_ydata()) == pytest.approx([0.2]), "the stem has no activation scale"
    assert list(acts.axes[0].lines[0].get_xdata()) == pytest.approx([0.8])
    assert [tick.get_text() for tick in weights.axes[1].get_xticklabels()] == LAYERS


def test_methods_have_the_papers_numbers_once() -> None:
    four = [8, 6, 4, 2]
    rows = [row(bit_choices=four, seed=seed, top1=dict.fromkeys("8642", 90.0 + seed)) for seed in (0, 2)]
    rows += [row("literal", bit_choices=four), row(bit_choices=four, ties="up"), row(bit_choices=four, kd="teacher")]
    rows += [row(bit_choices=four, epochs=1), row(scheme="lsq", bit_choices=[2])]
    methods = figures.methods_of(result_rows.group(rows), (8, 6, 4, 2))
    assert [method.label for method in methods if method.ours] == [
        "Double Rounding, ALRS relative",
        "Double Rounding, ALRS relative, KD teacher",
        "Double Rounding, ALRS literal",
        "one LSQ model per width",
    ], "no ablations, no runs of another length"
    assert methods[0].ours[8] == (91.0, 90.0, 92.0)
    assert methods[0].paper == {8: 92.25, 6: 92.32, 4: 92.09, 2: 90.19}
    assert set(methods[-1].ours) == {2}
    assert sum(bool(method.paper) for method in methods) == 6, "every line of the paper, once"


def test_accuracies_beyond_the_edge_have_their_number() -> None:
    methods = [figures.Method("ours", {8: (91.0, 90.0, 92.0), 2: (50.0, 50.0, 50.0)}, {8: 92.0, 2: 38.19})]
    (ax,) = figures.accuracies(methods, (8, 2)).axes
    assert sorted(text.get_text() for text in ax.texts) == ["← 38.2", "← 50.0"]
    drawn = [line for line in ax.lines if len(line.get_xdata()) == 1]
    assert [line.get_xdata()[0] for line in drawn] == [figures.LEAST, figures.LEAST, 91.0, 92.0]
    assert [line.get_fillstyle() for line in drawn] == ["full", "none"] * 2
