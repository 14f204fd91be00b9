"""The gallery: its rows on a few tiny models, what a crash leaves, and the page."""

import concurrent.futures
import importlib
import json
import queue
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def gallery(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("gallery")


def test_the_page_is_what_the_rows_say(gallery: Any) -> None:
    page = gallery.gallery_page
    assert page.PAGE.read_text(encoding="utf-8") == page.current(), "run python benchmarks/gallery.py --page"
    rows = json.loads(page.ROWS.read_text(encoding="utf-8"))["rows"]
    assert len(rows) >= 25
    for row in rows:
        needed = ("model", "source", "quantised_share", "trained_equals_live", "onnx_max_difference", "note")
        assert all(key in row for key in needed), row["model"]
        done = row["trained_equals_live"] is True and row["onnx_max_difference"] is not None
        assert done or row["problems"], f"{row['model']} has neither a result nor a reason"


def test_rows_of_tiny_models(gallery: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime")
    monkeypatch.setattr(gallery, "ONNX_WIDTHS", (4,))
    row = gallery.measure("own", "graph network")
    assert row["problems"] == []
    assert row["trained_equals_live"] is row["trainable_equals_live"] is row["integer_equals_exact"] is True
    assert row["quantised_share"] == pytest.approx(24 * 24 / (8 * 24 + 24 + 24 * 24 + 24 + 24 * 10 + 10), abs=1e-4)
    assert row["onnx_max_difference"] < 1e-5
    assert row["float_layers"] == {"Linear is a first layer": ["first"], "Linear is a last layer": ["head"]}
    row = gallery.measure("own", "weight norm")
    assert "prepare refused: ConfigError: layer 'layers.2'" in row["note"]
    assert row["trained_equals_live"] is row["onnx_max_difference"] is None


def test_what_differs_is_seen(gallery: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gallery, "ONNX_WIDTHS", ())
    load = gallery.load

    def other(*args: Any, **settings: Any) -> Any:
        live = load(*args, **settings)
        live.get_submodule("head").bias.data += 1e-6
        return live

    monkeypatch.setattr(gallery, "load", other)
    assert gallery.measure("own", "graph network")["trained_equals_live"] is False


def test_a_model_that_crashes_ends_nothing(gallery: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Pool:
        """A process that dies of the model called 'bad', and does no more."""

        def __init__(self) -> None:
            self._processes: dict[int, Any] = {}

        def submit(self, function: Any, source: str, name: str, seed: int) -> Any:
            found: concurrent.futures.Future[Any] = concurrent.futures.Future()
            if name == "bad" or getattr(self, "dead", False):
                self.dead = True
                found.set_exception(concurrent.futures.BrokenExecutor("died"))
            else:
                found.set_result({"model": name})
            return found

        def shutdown(self) -> None:
            pass

    monkeypatch.setattr(gallery, "_new_pool", Pool)
    todo: queue.SimpleQueue[Any] = queue.SimpleQueue()
    done: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for name in ("a", "bad", "b"):
        todo.put(("own", name))
    gallery._work(todo, done, 0, 1.0)
    first, second, third = (done.get_nowait() for _ in range(3))
    assert (first["model"], third["model"]) == ("a", "b")
    assert "BrokenExecutor" in second["note"]


def test_a_run_goes_on_where_it_was_stopped(gallery: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []

    def measure_all(wanted: list[Any], *_: Any) -> Any:
        asked.append([name for _, name in wanted])
        return iter([])

    monkeypatch.setattr(gallery, "measure_all", measure_all)
    monkeypatch.setattr(gallery, "SOURCES", {"own": {"a": None, "b": None}, "timm": {"c": None}})
    out = tmp_path / "rows.json"
    out.write_text(json.dumps({"rows": [{"source": "own", "model": "a"}]}))
    for arguments in ([], ["--timm"], ["--anew"], ["--only", "a"]):
        gallery.main([*arguments, "--out", str(out)])
    assert asked == [["b"], ["b", "c"], ["a", "b"], ["a"]]
