"""The pages in a real browser: the dial turns by keyboard, tooltips appear, nothing is wider than a telephone.

Skipped where chromium is not installed. Each test takes about a second; starting chromium takes two.
"""

from pathlib import Path
from typing import Any

import pytest

from bitdial.dial.plan import BitPlan
from bitdial.planning import MeasuredFront, MeasuredPlan
from bitdial.report import Known, Samples, front_report
from bitdial.sensitivity.result import LayerSensitivity, Sensitivity

LAYERS = [f"layer{number}.0.a_rather_long_name_of_a_convolution" for number in range(12)]
NAMES = ["2.00 bits (2 bits everywhere)", "3.00 bits", "4.00 bits"]
STATE = """(() => ({
    name: document.getElementById("dial-name").textContent,
    value: document.getElementById("dial-range").getAttribute("aria-valuetext"),
    facts: [...document.querySelectorAll("#dial-facts .now")].map((cell) => cell.textContent),
    bits: [...document.querySelectorAll("#dial-bars .bits")].map((cell) => cell.textContent),
    widths: [...document.querySelectorAll("#dial-bars .bar")].map((bar) => bar.style.width),
    code: document.getElementById("dial-code").textContent,
    chosen: [...document.querySelectorAll(".point.chosen")].map((mark) => mark.dataset.setting),
}))()"""
TIP = (
    '(() => { const t = document.querySelector(".tip"); return t.hidden ? null : t.innerText.replace(/\\s/g, " "); })()'
)


def measured(bits: list[int], accuracy: float, name: str | None) -> MeasuredPlan:
    average = sum(bits) / len(bits)
    costs = {
        "average_bits": average,
        "layer_average_bits": average,
        "bytes": 1000 * sum(bits),
        "bitops": 10**9 * sum(bits),
    }
    plan = BitPlan(dict(zip(LAYERS, bits, strict=True)))
    return MeasuredPlan(plan=plan, costs=costs, accuracy=accuracy, predicted_loss=5 - average, name=name)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "front.html"
    low, middle, high = [2] * 12, [2, 4] * 6, [4] * 12
    plans = (measured(low, 0.9, "2.00 bits"), measured(middle, 0.95, "3.00 bits"), measured(high, 0.96, "4.00 bits"))
    layers = {n: LayerSensitivity(trace=10.0**i, error=0.1, parameters=10, samples=16) for i, n in enumerate(LAYERS)}
    front = MeasuredFront(label="net", quantity="average_bits", samples=200, candidates=plans, uniform=plans[:1])
    other = MeasuredFront(label="x" * 60, quantity="average_bits", samples=200, candidates=plans[:2], uniform=())
    known = Known(float_accuracy=0.97, float_bytes=10**9, tested={plans[0].plan: 0.5}, test=Samples(500, "test images"))
    sensitivity = Sensitivity(layers=layers, images=99)
    front_report(path, front, sensitivity, file="a_rather_long_name.safetensors", known=known, others=[other])
    return path


def test_the_dial_turns_by_keyboard_and_every_number_follows(page: Path, browser: Any) -> None:
    browser.open(page, width=1280, dark=False)
    state = browser.run(STATE)
    assert (state["name"], state["chosen"]) == (NAMES[1], ["1"])
    assert state["facts"][:4] == ["95.0 %", "91.0 to 97.3 %", "−2.0 points", "–"]
    assert state["bits"] == ["2 bits", "4 bits"] * 6
    assert state["widths"] == ["50%", "100%"] * 6
    assert state["code"] == 'set_bits(model, "3.00 bits")'
    browser.press("Tab")
    assert browser.run("document.activeElement.id") == "dial-range"
    browser.press("ArrowRight")
    state = browser.run(STATE)
    assert (state["name"], state["chosen"], state["bits"]) == (NAMES[2], ["2"], ["4 bits"] * 12)
    assert state["facts"][0] == "96.0 %"
    assert state["value"].startswith("4.00 bits: 96.0 %")
    browser.press("ArrowLeft", "ArrowLeft")
    state = browser.run(STATE)
    assert (state["name"], state["bits"], state["facts"][3]) == (NAMES[0], ["2 bits"] * 12, "50.0 %")
    browser.press("End")
    assert browser.run(STATE)["name"] == NAMES[2]


def test_a_mark_turns_the_dial_by_click_and_by_enter(page: Path, browser: Any) -> None:
    browser.open(page, width=1280, dark=False)
    first = '.point[data-setting="0"]'
    browser.run(f"document.querySelector('{first}').dispatchEvent(new MouseEvent('click'))")
    assert browser.run(STATE)["name"] == NAMES[0]
    browser.run(f"document.querySelector('{first}').focus()")
    browser.press("ArrowRight", "ArrowRight")
    assert browser.run(STATE)["name"] == NAMES[0]  # the focus alone chooses nothing
    browser.press("Enter")
    assert browser.run(STATE)["name"] == NAMES[2]


def test_tooltips_appear_under_the_mouse_and_the_focus_and_go(page: Path, browser: Any) -> None:
    browser.open(page, width=400, dark=False)
    assert browser.run(TIP) is None
    browser.hover('.point[data-setting="2"] .mark')
    assert browser.run(TIP).startswith("4.00 bits: 96.0 %, 95 % interval")
    box = browser.run(
        "(() => { const b = document.querySelector('.tip').getBoundingClientRect(); return [b.left, b.right]; })()"
    )
    assert 0 <= box[0] < box[1] <= 400
    browser.run("document.querySelector('.point[data-setting=\"0\"]').focus()")
    assert browser.run(TIP).startswith("2.00 bits: 90.0 %")
    browser.press("ArrowRight")
    assert browser.run(TIP).startswith("3.00 bits: 95.0 %")
    browser.press("Escape")
    assert browser.run(TIP) is None
    assert browser.run("document.querySelectorAll('.plot title').length") == 0  # or the browser would show a second one


def test_every_point_is_within_reach_of_the_keyboard_and_each_figure_is_one_stop(page: Path, browser: Any) -> None:
    browser.open(page, width=1280, dark=False)
    counts = """[...document.querySelectorAll(".plot")].map((plot) => {
        const points = [...plot.querySelectorAll(".point")];
        return [points.length, points.filter((point) => point.tabIndex === 0).length,
                points.filter((point) => point.hasAttribute("tabindex") && point.getAttribute("aria-label")).length];
    })"""
    found = [entry for entry in browser.run(counts) if entry[0]]
    assert len(found) >= 5
    for points, stops, labelled in found:
        assert stops == 1
        assert labelled == points


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [400, 1280])
def test_nothing_is_wider_than_the_window_and_the_mode_is_followed(
    page: Path, browser: Any, width: int, dark: bool
) -> None:
    browser.open(page, width=width, dark=dark)
    browser.run("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
    assert browser.run("[innerWidth, document.documentElement.scrollWidth]") == [width, width]
    beyond = """[...document.querySelectorAll("main *")].filter((one) => !one.closest(".wide") &&
        one.getBoundingClientRect().right > innerWidth + 0.5).map((one) => one.outerHTML.slice(0, 80))"""
    assert browser.run(beyond) == []
    small = """[...document.querySelectorAll(".plot text")].filter((text) =>
        parseFloat(getComputedStyle(text).fontSize) < 12 || text.getBoundingClientRect().height < 12).length"""
    assert browser.run(small) == 0
    ground, ink = browser.run(
        "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
    )
    brightness = [sum(map(int, colour[4:-1].split(","))) for colour in (ground, ink)]
    assert (brightness[0] < brightness[1]) == dark


def test_without_scripts_the_tables_are_there_and_the_dial_is_not(page: Path, browser: Any) -> None:
    browser.open(page, width=400, dark=False, scripts=False)
    root = browser.call("DOM.getDocument")["root"]["nodeId"]
    for selector, shown in (("#dial", False), ("main > .wide", True), (".plot", True)):
        node = browser.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        styles = browser.call("CSS.getComputedStyleForNode", nodeId=node)["computedStyle"]
        assert next(entry["value"] for entry in styles if entry["name"] == "display") == ("block" if shown else "none")
