"""The page: complete, self-contained, escaped, the same every time, and never half-written."""

import base64
import hashlib
import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bitdial.artifact import Artifact, read_artifact, save, sizes
from bitdial.dial.dial import get_bits, set_bits
from bitdial.errors import BitdialError, ConfigError
from bitdial.live.load import load
from bitdial.models import build_model
from bitdial.prepare.config import QuantConfig
from bitdial.prepare.prepare import prepare
from bitdial.report import Samples, demo_report, weight_steps, write_report
from bitdial.report.charts import accuracy_by_bits, weight_histograms
from bitdial.report.markup import element, table
from bitdial.report.page import SCRIPT, details, figure, remarks

BITS = (8, 6, 4, 2)
SAMPLES = Samples(1000, "test images")
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
    chart = accuracy_by_bits(0.9, {8: 0.9, 2: 0.8}, SAMPLES)
    settings: dict[str, Any] = {
        "title": "A run",
        "body": [
            table("Summary", ROWS),
            figure("Accuracy", "How to read it.", chart),
            remarks(["First.", "Second."]),
        ],
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
        "bytes": {"float": 40_000, "artifact": artifact.file_bytes, "separate": separate},
        "artifact": "/home/someone/demo.safetensors",
    }
    history = changes.pop("history", make_history(list(artifact.layers)))
    demo_report(path, result | changes, history, artifact, load(artifact), SAMPLES)
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
    chart = accuracy_by_bits(0.9, {8: 0.9, 2: 0.8}, SAMPLES)
    body = [table("Summary", ROWS), figure("Accuracy", "How to read it.", chart), details({"Digest": "ab12"})]
    page = page_with(tmp_path / "a.html", lead="Lead.", body=[*body, remarks(["First.", "Second."])])
    assert page.all("html") == [{"lang": "en"}]
    assert {"charset": "utf-8"} in page.all("meta")
    assert any(meta.get("name") == "viewport" for meta in page.all("meta"))
    assert page.words["h1"] == ["A run"]
    assert page.words["title"][0] == "A run"
    assert page.words["h2"] == ["Accuracy", "Details", "Notes"]
    assert page.words["figcaption"] == ["How to read it."]
    assert page.words["p"] == ["Lead.", chart.title]
    assert page.words["li"][-2:] == ["First.", "Second."]
    assert (page.words["dt"], page.words["dd"]) == (["Digest"], ["ab12"])
    assert page.words["th"][:4] == ["Bits", "Accuracy", "8 bits", "2 bits"]
    assert page.words["td"][:2] == ["99.0 %", "90.0 %"]
    assert [cell["scope"] for cell in page.all("th")][:4] == ["col", "col", "row", "row"]
    for name in ("table", "caption"):
        assert len(page.all(name)) == 2  # the summary, and the figure's numbers
    (plot,) = (svg for svg in page.all("svg") if svg.get("class") == "plot")
    assert plot["role"] == "group"
    assert plot["aria-label"] == chart.title
    assert page.words["title"][1:] == [f"{n}: {a}" for n, a in (
        ("float", "90.0 %, 95 % interval 88.0 to 91.7 %"), ("8 bits", "90.0 %, 95 % interval 88.0 to 91.7 %"),
        ("2 bits", "80.0 %, 95 % interval 77.4 to 82.4 %"))]  # fmt: skip


def test_parts_that_are_not_given_leave_nothing_behind(tmp_path: Path) -> None:
    page = page_with(tmp_path / "a.html", body=[])
    assert {"table", "figure", "svg", "ul", "dl", "p", "h2"} & {tag for tag, _ in page.tags} == set()


def test_page_refers_to_nothing_outside_and_only_its_script_may_run(tmp_path: Path, demo: Path) -> None:
    page_with(tmp_path / "a.html")
    script = SCRIPT.read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    for path in (tmp_path / "a.html", demo):
        text = path.read_text(encoding="utf-8")
        assert not re.findall(r"https?://", text)
        assert not re.search(r"<(link|iframe|img|image|object|embed|base)\b|@import|\bsrc=|url\(|href=", text)
        assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in text
        assert f"<script>{script}</script>" in text
        assert "innerHTML" not in text
        assert len(text) < 100_000


def test_text_is_escaped_everywhere(tmp_path: Path) -> None:
    evil = '</title><script>alert("1")</script>&amp;\'"'
    chart = weight_histograms({2: [0.0, 1.0]}, layer=evil, unit=evil)
    body = [
        table(evil, [(evil, evil), (evil, evil)]),
        figure(evil, evil, chart),
        remarks([evil]),
        details({evil: evil}),
    ]
    page = page_with(tmp_path / "a.html", title=evil, lead=evil, body=[*body, element("p", evil, aria_label=evil)])
    assert len(page.all("script")) == 1  # the page's own
    for tag in ("title", "h1", "h2", "p", "th", "td", "caption", "figcaption", "li", "dt", "dd"):
        assert page.words[tag][0].startswith(evil), tag
    assert evil in page.words["text"]
    assert page.all("p")[-1]["aria-label"] == evil


def test_text_that_is_not_unicode_does_not_stop_the_page(tmp_path: Path) -> None:
    page_with(tmp_path / "a.html", title="caf\udce9 é 漢", body=[])
    assert "é 漢" in (tmp_path / "a.html").read_text(encoding="utf-8")


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
    page_with(tmp_path / "new" / "deep" / "a.html", body=[])
    with pytest.raises(BitdialError, match="cannot write"):
        page_with(tmp_path / "new", body=[])
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


# --- the demo's page ----------------------------------------------------------------------------


def test_demo_table_has_accuracy_interval_difference_bytes_and_share(demo: Path, artifact: Artifact) -> None:
    text = demo.read_text(encoding="utf-8").partition("<h2>Every setting</h2>")[2].partition("</table>")[0]
    page = Page(text + "</table></div>")
    heads = ["Accuracy on 1,000 test images", "95 % interval", "Difference to float", "Bytes as a separate file"]
    assert page.words["th"][:6] == ["Setting", *heads, "Share of float size"]
    assert page.words["th"][6:] == ["float", "8 bits", "6 bits", "4 bits", "2 bits"]
    cells = [page.words["td"][i : i + 5] for i in range(0, 25, 5)]
    separate = sizes(artifact)["separate"]
    assert cells[0] == ["97.5 %", "96.3 to 98.3 %", "–", "40,000", "100 %"]
    assert cells[1] == ["98.0 %", "96.9 to 98.7 %", "+0.5 points", f"{separate[8]:,}", f"{separate[8] / 400:.0f} %"]
    assert cells[2][1:3] == ["–", "+0.0 points"]  # 974.9 of 1,000 are no count
    assert cells[3][2] == "+0.0 points"
    assert cells[4] == ["90.0 %", "88.0 to 91.7 %", "−7.5 points", f"{separate[2]:,}", f"{separate[2] / 400:.0f} %"]
    whole = read(demo)
    assert "40.0 kB" in whole.words["text"]  # in the figure of bytes
    (below,) = (text for text in whole.words["p"] if text.startswith("One file for all"))
    assert f"{artifact.file_bytes:,} bytes" in below
    assert f"{sum(separate.values()):,} bytes together" in below


def test_demo_shows_all_figures_and_the_facts_of_the_file(demo: Path, artifact: Artifact) -> None:
    page = read(demo)
    assert len(page.all("figure")) == len(page.words["figcaption"]) == 6
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    facts = dict(zip(page.words["dt"], page.words["dd"], strict=True))
    assert facts["Digest"] == artifact.digest
    assert facts["Scheme"] == "double_rounding, ties even"
    assert facts["Quantised layers"].startswith(f"{len(artifact.layers)}, with")
    assert facts["File"] == f"demo.safetensors, {artifact.file_bytes:,} bytes"
    assert any("no float copy" in text for text in page.words["li"])
    assert "someone" not in demo.read_text(encoding="utf-8")


def test_demo_has_a_dial_over_its_widths(demo: Path, artifact: Artifact) -> None:
    found = re.findall(r'<script type="application/json" id="dial-data">(.*?)</script>', demo.read_text("utf-8"))
    (data,) = map(json.loads, found)
    separate = sizes(artifact)["separate"]
    assert [setting["name"] for setting in data["settings"]] == ["2 bits", "4 bits", "6 bits", "8 bits"]
    assert data["layers"] == list(artifact.layers)
    for setting, bits in zip(data["settings"], reversed(BITS), strict=True):
        assert setting["code"] == f"set_bits(model, {bits})"
        assert setting["layers"] == [[bits, f"{bits} bits"]] * len(artifact.layers)
        assert setting["facts"][3:5] == [f"{bits}", f"{separate[bits]:,}"]
    assert data["settings"][0]["facts"][:3] == ["90.0 %", "88.0 to 91.7 %", "−7.5 points"]


def test_demo_leaves_out_gradients_that_the_run_did_not_have(tmp_path: Path, artifact: Artifact) -> None:
    history = make_history(list(artifact.layers))
    for entries in history["gradients"].values():
        for entry in entries:
            entry["act"] = [0.0] * len(artifact.layers)
    page = make_demo(tmp_path / "a.html", artifact, history=history)
    assert len(page.all("figure")) == 5
    assert "Gradients of the activation scales" not in page.words["h2"]


def test_demo_of_a_scheme_that_cannot_narrow_says_that_the_file_keeps_float_weights(tmp_path: Path) -> None:
    page = make_demo(tmp_path / "a.html", make_artifact(tmp_path, scheme="lsq"))
    assert any("keeps those" in text and "float weights" in text for text in page.words["li"])
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
