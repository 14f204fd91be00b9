"""The page of a front: complete without scripts, alive with them, and closed to everything else."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from bitdial.dial.plan import BitPlan
from bitdial.errors import ConfigError
from bitdial.planning import MeasuredFront, MeasuredPlan
from bitdial.report import Known, Samples, front_report
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
    (found,) = re.findall(r'<script type="application/json" id="dial-data">(.*?)</script>', text, re.S)
    return json.loads(found)


def test_the_dial_has_the_plans_of_the_front_and_the_widths_each_once_by_cost(tmp_path: Path) -> None:
    front = make_front(uniform=(measured((2, 2, 2), 0.9, "2.00 bits"), measured((3, 3, 3), 0.94, None)))
    data = data_of(write(tmp_path / "a.html", front=front))
    assert data["layers"] == LAYERS
    assert [setting["name"] for setting in data["settings"]] == [
        "2.00 bits (2 bits everywhere)", f"2.67 bits{EVIL}", "3 bits everywhere", "4.00 bits"
    ]  # fmt: skip
    plans = [front.front[0], front.front[1], front.uniform[1], front.front[2]]
    for shown, one in zip(data["settings"], plans, strict=True):
        assert shown["facts"][0] == f"{100 * one.accuracy:.1f} %"
        assert {f"{one.costs['bytes']:,}", f"{one.costs['bitops']:,}"} <= set(shown["facts"])
        assert shown["layers"] == [[one.plan[layer][0], f"{one.plan[layer][0]} bits"] for layer in LAYERS]
        setting = json.loads(shown["code"].removeprefix("set_bits(model, ").removesuffix(")"))
        assert setting == (one.name or 3)
        low, middle, high = shown["at"]
        assert 0 <= low < middle < high <= 100
    assert data["settings"][0]["facts"][1] == "85.1 to 93.4 %"  # 180 of 200
    assert 0 <= data["chosen"] < 4
    assert data["most"] == 4


def test_every_setting_has_its_mark_and_every_part_that_the_script_fills_is_there(tmp_path: Path) -> None:
    text = write(tmp_path / "a.html")
    script = text.rpartition("<script>")[2]
    for name in re.findall(r'getElementById\("([\w-]+)"\)', script):
        assert text.count(f'id="{name}"') == 1, name
    assert [text.count(f'data-setting="{number}"') for number in range(4)] == [1, 1, 1, 0]
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))


def test_the_page_is_whole_without_scripts(tmp_path: Path) -> None:
    text = re.sub(r"<script.*?</script>", "", write(tmp_path / "a.html"), flags=re.S)
    assert 'id="dial" hidden' in text  # what only a script can fill stays away
    tables = dict(re.findall(r"<table><caption>(.*?)</caption>(.*?)</table>", text, re.S))
    rows = re.findall(r"<tr>.*?</tr>", tables["Bits by layer"], re.S)
    assert [re.findall(r"<td>(.*?)</td>", row) for row in rows[1:]] == [
        ["2", "4", "4"],
        ["2", "2", "4"],
        ["2", "2", "4"],
    ]
    for words in ("2.00 bits", "4.00 bits", "4 bits everywhere", "95.0", "8,000", "256", "91.0 to 97.3"):
        assert words in tables["Every setting"], words
    assert "Accuracy on 200 held-out samples" in tables["Every setting"]
    assert "rank correlation of −0.80" in text
    assert text.count("<figure") == 4
    assert len(re.findall("<details", text)) == 5  # the numbers of each figure, and the bits


def test_what_is_known_of_float_and_of_test_images_stands_beside(tmp_path: Path) -> None:
    front = make_front()
    tested = {one.plan: 0.9 + place / 100 for place, one in enumerate(front.front[:2])}
    known = Known(
        float_accuracy=0.97, float_tested=0.95, float_bytes=9999, tested=tested, test=Samples(500, "test images")
    )
    text = write(tmp_path / "a.html", known=known)
    data = data_of(text)
    assert [one["facts"][2:4] for one in data["settings"]] == [
        ["−7.0 points", "90.0 %"], ["−2.0 points", "91.0 %"], ["−1.0 points", "–"]
    ]  # fmt: skip
    dial = text.partition('id="dial-facts"')[2].partition("</table>")[0].replace("\u00a0", " ")
    floats = re.findall(r'<td class="now"></td><td>(.*?)</td>', dial)
    assert floats[:7] == ["97.0 %", "93.6 to 98.6 %", "–", "95.0 %", "32", "32", "9,999"]
    (summary,) = re.findall(r"<caption>Every setting</caption>(.*?)</table>", text.replace("\u00a0", " "), re.S)
    assert "Accuracy on 500 test images" in summary
    assert "<td>91.0 %</td><td>88.2 to 93.2 %</td>" in summary
    assert "Those on 500 test images chose nothing" in text
    alone = write(tmp_path / "b.html")
    assert ">Float<" not in alone
    assert "test images" not in alone


class Tags(HTMLParser):
    """The elements of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.found: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append(tag)


def test_names_cannot_end_the_data_or_become_markup(tmp_path: Path) -> None:
    text = write(tmp_path / "a.html")
    tags = Tags(text).found
    assert tags.count("script") == 2
    assert "b" not in tags
    assert data_of(text)["layers"][1] == LAYERS[1]
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text)


def test_other_fronts_are_drawn_beside_it_and_compared_over_common_budgets(tmp_path: Path) -> None:
    other = make_front("other", candidates=(measured((2, 2, 2), 0.8, "2.00 bits"),))
    text = write(tmp_path / "a.html", others=[other])
    assert text.count("<figure") == 5
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
    assert text.count("<figure") == 3
    assert "Bits by layer over" not in text
    assert "rank correlation of" not in text


def test_same_input_gives_the_same_page(tmp_path: Path) -> None:
    assert write(tmp_path / "a.html") == write(tmp_path / "b.html")
