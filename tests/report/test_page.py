"""The page: complete, self-contained, escaped, the same every time, and never half-written."""

import os
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bitdial.artifact import Artifact, read_artifact, save, sizes
from bitdial.dial.dial import get_bits, set_bits
from bitdial.errors import BitdialError, ConfigError, MissingDependencyError
from bitdial.live.load import load
from bitdial.models import build_model
from bitdial.prepare.config import QuantConfig
from bitdial.prepare.prepare import prepare
from bitdial.report import demo_report, plots, weight_steps, write_report

BITS = (8, 6, 4, 2)
ROWS = [("Bits", "Accuracy"), ("8 bits", "99.0 %"), ("2 bits", "90.0 %")]
VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """A page taken apart: its tags, ids, text by tag; checks that every element is closed."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and data.strip():
            self.words.setdefault(self._open[-1], []).append(data.replace("\u00a0", " "))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def page_with(path: Path, **changes: Any) -> Page:
    figure = plots.accuracy_by_bits(0.9, {8: 0.9, 2: 0.8})
    settings: dict[str, Any] = {
        "title": "A run",
        "summary_rows": ROWS,
        "figures": [("Accuracy", "How to read it.", figure), ("Again", "The same.", figure)],
        "notes": ["First.", "Second."],
    }
    write_report(path, **settings | changes)
    return read(path)


def make_history(layers: list[str]) -> dict[str, Any]:
    entry = {"weight": [0.5] * len(layers), "act": [0.25] * len(layers)}
    return {
        "layers": layers,
        "rows": [{"epoch": e, "top1": {str(b): 0.5 + e / 10 for b in BITS}} for e in range(2)],
        "gradients": {str(b): [{"step": s, **entry} for s in range(3)] for b in BITS},
    }


def make_artifact(folder: Path, **settings: Any) -> Artifact:
    torch.manual_seed(0)
    model = build_model("cifar_resnet", blocks=1, width=4, in_channels=1)
    prepared = prepare(model, QuantConfig(start="3std", **settings), torch.randn(8, 1, 8, 8))
    save(prepared, folder / "demo.safetensors")
    return read_artifact(folder / "demo.safetensors")


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return make_artifact(tmp_path_factory.mktemp("artifact"))


def make_demo(path: Path, artifact: Artifact, **changes: Any) -> Page:
    separate = {str(bits): count for bits, count in sizes(artifact)["separate"].items()}
    result = {
        "float_top1": 0.975,
        "top1": {"8": 0.98, "6": 0.9749, "4": 0.975, "2": 0.9},
        "bytes": {"float": 1, "artifact": artifact.file_bytes, "separate": separate},
        "artifact": "/home/someone/demo.safetensors",
    }
    history = changes.pop("history", make_history(list(artifact.layers)))
    demo_report(path, result | changes, history, artifact, load(artifact), 40_000)
    return read(path)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory, artifact: Artifact) -> Path:
    """The demo's page, written once."""
    path = tmp_path_factory.mktemp("demo") / "demo.html"
    make_demo(path, artifact)
    return path


def read(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


# --- any page -----------------------------------------------------------------------------------


def test_page_has_the_structure_that_readers_and_screen_readers_need(tmp_path: Path) -> None:
    page = page_with(tmp_path / "a.html", lead="Lead.", summary_note="Below.", facts={"Digest": "ab12"})
    assert page.all("html") == [{"lang": "en"}]
    assert {"charset": "utf-8"} in page.all("meta")
    assert any(meta.get("name") == "viewport" for meta in page.all("meta"))
    assert page.words["title"] == page.words["h1"] == ["A run"]
    assert page.words["h2"] == ["Accuracy", "Again", "Details", "Notes"]
    assert page.words["figcaption"] == ["How to read it.", "The same."]
    assert page.words["p"] == ["Lead.", "Below."]
    assert page.words["li"] == ["First.", "Second."]
    assert (page.words["dt"], page.words["dd"]) == (["Digest"], ["ab12"])
    assert page.words["th"] == ["Bits", "Accuracy", "8 bits", "2 bits"]
    assert page.words["td"] == ["99.0 %", "90.0 %"]
    assert [cell["scope"] for cell in page.all("th")] == ["col", "col", "row", "row"]
    assert len(page.all("caption")) == 1
    for svg in page.all("svg"):
        assert svg["role"] == "img"
        assert svg["aria-label"]


def test_ids_are_unique_even_if_a_figure_is_shown_twice(tmp_path: Path) -> None:
    page = page_with(tmp_path / "a.html")
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) > 20
    assert len(ids) == len(set(ids))
    text = (tmp_path / "a.html").read_text()
    used = set(re.findall(r"(?:url\(#|href=\"#|aria-labelledby=\")([^)\"]+)", text))
    assert used
    assert used <= set(ids)


def test_parts_that_are_not_given_leave_nothing_behind(tmp_path: Path) -> None:
    page = page_with(tmp_path / "a.html", summary_rows=[], figures=[], notes=[])
    assert {"table", "figure", "svg", "ul", "dl", "p", "h2"} & {tag for tag, _ in page.tags} == set()


def test_page_refers_to_nothing_outside(tmp_path: Path, demo: Path) -> None:
    page_with(tmp_path / "a.html")
    for path in (tmp_path / "a.html", demo):
        text = path.read_text(encoding="utf-8")
        assert set(re.findall(r"https?://[^\"\s)]*", text)) <= {"http://www.w3.org/2000/svg"}
        assert not re.search(r"<(script|link|iframe|img|image|object|embed|base)\b|@import|\bsrc=", text)
        assert all(target.startswith("#") for target in re.findall(r"(?:href=\"|url\()([^\")]*)", text))
        assert "default-src 'none'" in text


def test_text_is_escaped_everywhere(tmp_path: Path) -> None:
    evil = '</title><script>alert("1")</script>&amp;\'"'
    figure = plots.weight_histograms({2: [0.0, 1.0]}, layer=evil)
    page = page_with(
        tmp_path / "a.html",
        title=evil,
        lead=evil,
        summary_rows=[(evil, evil), (evil, evil)],
        summary_note=evil,
        figures=[(evil, evil, figure)],
        notes=[evil],
        facts={evil: evil},
    )
    assert not page.all("script")
    for tag in ("title", "h1", "p", "td", "figcaption", "li", "dt", "dd"):
        assert "".join(page.words[tag]).startswith(evil), tag
    assert str(page.all("svg")[0]["aria-label"]).startswith(evil)


def test_text_that_is_not_unicode_does_not_stop_the_page(tmp_path: Path) -> None:
    page_with(tmp_path / "a.html", title="caf\udce9 é 漢", figures=[])
    assert "é 漢" in (tmp_path / "a.html").read_text(encoding="utf-8")


def test_rows_of_different_length_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs 2 cells"):
        page_with(tmp_path / "a.html", summary_rows=[*ROWS, ("only one",)])
    assert not (tmp_path / "a.html").exists()


def test_same_input_gives_the_same_page(tmp_path: Path, demo: Path, artifact: Artifact) -> None:
    make_demo(tmp_path / "a.html", artifact)
    assert (tmp_path / "a.html").read_bytes() == demo.read_bytes()


@pytest.mark.parametrize("failing", ["write_text", "replace"])
def test_a_failed_write_leaves_the_old_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    path = tmp_path / "a.html"
    path.write_text("old")

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(*((Path, "write_text") if failing == "write_text" else (os, "replace")), full)
        with pytest.raises(BitdialError, match=r"a\.html.*No space left"):
            page_with(path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_folders_are_made_and_a_folder_in_the_way_is_an_error(tmp_path: Path) -> None:
    page_with(tmp_path / "new" / "deep" / "a.html", figures=[])
    with pytest.raises(BitdialError, match="cannot write"):
        page_with(tmp_path / "new", figures=[])
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_missing_matplotlib_leaves_the_old_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, artifact: Artifact
) -> None:
    path = tmp_path / "a.html"
    path.write_text("old")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingDependencyError, match=r"bitdial\[report\]"):
        make_demo(path, artifact)
    assert path.read_text() == "old"


# --- the demo's page ----------------------------------------------------------------------------


def test_demo_table_has_accuracy_difference_bytes_and_share(demo: Path, artifact: Artifact) -> None:
    page = read(demo)
    assert page.words["th"][5:] == ["float", "8 bits", "6 bits", "4 bits", "2 bits"]
    cells = [page.words["td"][i : i + 4] for i in range(0, 20, 4)]
    separate = sizes(artifact)["separate"]
    assert cells[0] == ["97.5 %", "–", "40,000 bytes", "100 %"]
    assert cells[1] == ["98.0 %", "+0.5 points", f"{separate[8]:,} bytes", f"{separate[8] / 400:.0f} %"]
    assert cells[2][1] == cells[3][1] == "+0.0 points"
    assert cells[4] == ["90.0 %", "−7.5 points", f"{separate[2]:,} bytes", f"{separate[2] / 400:.0f} %"]
    assert "40.0 kB" in page.words["text"]  # in the figure of bytes
    below = page.words["p"][1]
    assert f"{artifact.file_bytes:,} bytes" in below
    assert f"{sum(separate.values()):,} bytes together" in below


def test_demo_shows_all_figures_and_the_facts_of_the_file(demo: Path, artifact: Artifact) -> None:
    page = read(demo)
    assert len(page.all("svg")) == len(page.words["figcaption"]) == 6
    facts = dict(zip(page.words["dt"], page.words["dd"], strict=True))
    assert facts["Digest"] == artifact.digest
    assert facts["Scheme"] == "double_rounding, ties even"
    assert facts["Quantised layers"].startswith(f"{len(artifact.layers)}, with")
    assert facts["File"] == f"demo.safetensors, {artifact.file_bytes:,} bytes"
    assert "no float copy" in page.words["li"][0]
    assert "someone" not in demo.read_text(encoding="utf-8")


def test_demo_leaves_out_gradients_that_the_run_did_not_have(tmp_path: Path, artifact: Artifact) -> None:
    history = make_history(list(artifact.layers))
    for entries in history["gradients"].values():
        for entry in entries:
            entry["act"] = [0.0] * len(artifact.layers)
    page = make_demo(tmp_path / "a.html", artifact, history=history)
    assert len(page.all("svg")) == 5
    assert "Gradients of the activation scales" not in page.words["h2"]


def test_demo_of_a_scheme_that_cannot_narrow_says_that_the_file_keeps_float_weights(tmp_path: Path) -> None:
    page = make_demo(tmp_path / "a.html", make_artifact(tmp_path, scheme="lsq"))
    assert "keeps" in page.words["li"][0]
    assert "float weights" in page.words["li"][0]
    assert not any("integers" in text for text in [page.words["p"][0], *page.words["figcaption"][:-1]])


def test_weight_steps_are_the_live_weights_over_their_channels_step(artifact: Artifact) -> None:
    live, name = load(artifact), "layer3.0.conv2"
    layer: Any = live.get_submodule(name)
    for bits in BITS:
        set_bits(live, bits)
        active, step = layer.engine.active.double(), layer.codes.scale[0].double()
        expected = (active / step.view(-1, 1, 1, 1)).flatten()
        set_bits(live, 4)
        steps = torch.from_numpy(weight_steps(live, name, bits).copy())
        torch.testing.assert_close(steps, expected, rtol=1e-6, atol=1e-9)
        assert torch.equal(steps, steps.round())  # whole numbers of the stored step
        assert {pair[0] for pair in get_bits(live).values()} == {4}


def test_weight_steps_of_a_model_that_was_not_loaded_are_refused() -> None:
    with pytest.raises(ConfigError, match="'0' is a Linear"):
        weight_steps(nn.Sequential(nn.Linear(2, 2)), "0", 8)
