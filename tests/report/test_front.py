"""The page of a front: complete without scripts, alive with them, and closed to everything else."""

import base64
import hashlib
import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from bitdial.dial.plan import BitPlan
from bitdial.errors import ConfigError
from bitdial.planning import MeasuredFront, MeasuredPlan
from bitdial.report import front_report, plots
from bitdial.sensitivity.result import LayerSensitivity, Sensitivity

EVIL = '</script><b onclick="x">&\'"'
LAYERS = ["conv1", f"conv2{EVIL}", "conv3"]


def measured(bits: tuple[int, int, int], accuracy: float, name: str | None, loss: float | None = 1.0) -> MeasuredPlan:
    costs = {"average_bits": sum(bits) / 3, "layer_average_bits": 3.0, "bytes": 1000 * sum(bits)}
    costs |= {"bitops": 64 * bits[0], "activation_bytes": 77}
    plan = BitPlan(dict(zip(LAYERS, bits, strict=True)))
    return MeasuredPlan(plan=plan, costs=costs, accuracy=accuracy, predicted_loss=loss, name=name)


def make_front(label: str = "net", **changes: Any) -> MeasuredFront:
    settings: dict[str, Any] = {
        "label": label,
        "quantity": "average_bits",
        "samples": 200,
        "candidates": (
            measured((2, 2, 2), 0.9, "2.00 bits", 0.9),
            measured((4, 2, 2), 0.95, f"2.67 bits{EVIL}", 0.5),
            measured((2, 4, 4), 0.8, None, 0.7),
            measured((4, 4, 4), 0.96, "4.00 bits", 0.0),
        ),
        "uniform": (measured((2, 2, 2), 0.9, "2.00 bits"), measured((4, 4, 4), 0.96, "4.00 bits")),
    }
    return MeasuredFront(**settings | changes)


SENSITIVITY = Sensitivity(
    layers={n: LayerSensitivity(trace=3.0 - i, error=0.1, parameters=10, samples=16) for i, n in enumerate(LAYERS)},
    images=99,
)


def write(path: Path, **changes: Any) -> str:
    settings: dict[str, Any] = {"front": make_front(), "sensitivity": SENSITIVITY, "file": f"net{EVIL}.safetensors"}
    front_report(path, **settings | changes)
    return path.read_text(encoding="utf-8")


def data_of(text: str) -> dict[str, Any]:
    (found,) = re.findall(r'<script type="application/json" id="front-data">(.*?)</script>', text, re.S)
    return json.loads(found)


def test_data_has_what_a_choice_shows(tmp_path: Path) -> None:
    front = make_front()
    data = data_of(write(tmp_path / "a.html"))
    assert data["layers"] == LAYERS
    assert len(data["plans"]) == 3
    for shown, one in zip(data["plans"], front.front, strict=True):
        facts = dict(shown["facts"])
        assert facts["Accuracy"] == f"{100 * one.accuracy:.1f} %"
        assert facts["Bytes as a separate file"] == f"{one.costs['bytes']:,}"
        assert facts["BitOps for one input"] == f"{one.costs['bitops']:,}"
        assert shown["layers"] == [[one.plan[layer][0], f"{one.plan[layer][0]} bits"] for layer in LAYERS]
        assert json.loads(shown["code"].removeprefix("set_bits(model, ").removesuffix(")")) == one.name
    assert 0 <= data["chosen"] < 3
    assert data["most"] == 4
    assert data["colours"]["4"] == plots.PALETTE[4]


def test_every_choice_has_its_mark_and_every_part_that_the_script_fills_is_there(tmp_path: Path) -> None:
    text = write(tmp_path / "a.html")
    script = text.rpartition("<script>")[2]
    for name in re.findall(r'getElementById\("([\w-]+)"\)', script):
        assert text.count(f'id="{name}"') == 1, name
    assert [text.count(f'id="front-plan-{number}"') for number in range(4)] == [1, 1, 1, 0]
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))


def test_the_page_is_whole_without_scripts(tmp_path: Path) -> None:
    text = re.sub(r"<script.*?</script>", "", write(tmp_path / "a.html"), flags=re.S)
    assert 'id="front-choice" hidden' in text  # what only a script can fill stays away
    tables = re.findall(r"<table>.*?</table>", text, re.S)
    assert len(tables) == 2
    rows = re.findall(r"<tr>.*?</tr>", tables[0], re.S)
    assert [re.findall(r"<td>(.*?)</td>", row) for row in rows[1:]] == [
        ["2", "4", "4"],
        ["2", "2", "4"],
        ["2", "2", "4"],
    ]
    for words in ("2.00 bits", "4.00 bits", "4 bits everywhere", "95.0", "8,000", "256"):
        assert words in tables[1], words
    assert "rank correlation of −0.80" in text
    assert text.count("<svg") == 4


def test_only_this_script_may_run(tmp_path: Path) -> None:
    text = write(tmp_path / "a.html")
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.S)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in text
    assert len(re.findall(r"<script\b", text)) == 2
    assert "innerHTML" not in script
    assert set(re.findall(r"https?://[^\"\s)]*", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<(link|iframe|img|image|object|embed|base|b)\b|@import|\bsrc=", text)


def test_other_fronts_are_drawn_beside_it_and_compared_over_common_budgets(tmp_path: Path) -> None:
    other = make_front("other", candidates=(measured((2, 2, 2), 0.8, "2.00 bits"),))
    text = write(tmp_path / "a.html", others=[other])
    assert text.count("<svg") == 5
    # 0.9 for the first third of the budgets from 2 to 4, then 0.95
    assert f"net {100 * (0.9 + 2 * 0.95) / 3:.2f}\u00a0%, other 80.00\u00a0%" in text
    assert "+13.3 points to other" in text
    point = (measured((4, 4, 4), 0.9, "4.00 bits"),)
    apart = make_front("other", candidates=point)
    assert "share no budget" in write(tmp_path / "a.html", front=make_front(candidates=point), others=[apart])
    with pytest.raises(ConfigError, match="over bytes, this one over average_bits"):
        write(tmp_path / "b.html", others=[make_front("other", quantity="bytes")])
    with pytest.raises(ConfigError, match="one label"):
        write(tmp_path / "b.html", others=[make_front()])
    assert not (tmp_path / "b.html").exists()


def test_a_front_of_uniform_plans_alone_has_no_bits_figure_and_no_prediction(tmp_path: Path) -> None:
    one = measured((2, 2, 2), 0.9, "2.00 bits")
    text = write(tmp_path / "a.html", front=make_front(candidates=(one,)))
    assert text.count("<svg") == 3
    assert "Bits by layer over" not in text
    assert "rank correlation of" not in text


def test_same_input_gives_the_same_page(tmp_path: Path) -> None:
    assert write(tmp_path / "a.html") == write(tmp_path / "b.html")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_choosing_a_point_in_a_browser(tmp_path: Path) -> None:
    """A click on the first mark, then a choice from the list; each time the page says what was chosen."""
    text = write(tmp_path / "a.html")
    steps = """
    const facts = () => document.getElementById("front-facts").textContent;
    const first = facts();
    document.getElementById("front-plan-0").dispatchEvent(new MouseEvent("click"));
    const clicked = facts();
    const list = document.getElementById("front-list");
    list.value = "2";
    list.dispatchEvent(new Event("change"));
    const bars = [...document.querySelectorAll("#front-bars li")].map((row) => row.textContent);
    document.title = JSON.stringify([first, clicked, facts(), bars, document.querySelectorAll(".ring").length]);
    """
    text = re.sub(r'<meta http-equiv="Content-Security-Policy".*?>', "", text)  # or the steps could not run
    (tmp_path / "a.html").write_text(text.replace("</body>", f"<script>{steps}</script></body>"), encoding="utf-8")
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    done = subprocess.run(
        [*command, "--dump-dom", (tmp_path / "a.html").as_uri()], capture_output=True, text=True, timeout=120
    )
    (title,) = re.findall(r"<title>(.*?)</title>", done.stdout)
    first, clicked, chosen, bars, rings = json.loads(unescape(title))
    assert "Accuracy95.0 %" in first
    assert "Accuracy90.0 %" in clicked
    assert "Accuracy96.0 %" in chosen
    assert bars == [f"{layer}4 bits" for layer in LAYERS]
    assert rings == 1
