"""The dial of a page: a control that shows what each setting of a file gives, beside the float model.

The numbers are in the page as JSON; page.js shows them. Where no script runs, the dial stays hidden and the page's
tables have all of it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from bitdial.report.charts.plot import ROUND, Plot, interval_key, legend, percent_scale
from bitdial.report.markup import element, table, unfolding
from bitdial.report.numbers import Samples, interval_text, measured_text, percent

MOST_STOPS = 9  # that have their name below the control


@dataclass(frozen=True)
class Setting:
    """One stop of the dial.

    name      "4 bits", "2.97 bits"; `short` stands below the control
    code      what a user types to set it
    bits      (weight bits, activation bits) by layer
    accuracy  0 to 1, on the dial's samples
    facts     the other lines of the table: size and so on, the same keys for every setting
    """

    name: str
    short: str
    code: str
    bits: Mapping[str, tuple[int, int]]
    accuracy: float
    facts: Mapping[str, str]


@dataclass(frozen=True)
class FloatModel:
    """What the settings are compared with: `facts` by the names that settings have too; accuracy if it is known."""

    accuracy: float | None
    facts: Mapping[str, str]


def dial(settings: Sequence[Setting], samples: Samples, float_model: FloatModel | None, *, chosen: int) -> Element:
    """The section; `settings` from the fewest bits to the most, measured on `samples`, `chosen` the one shown first."""
    names = list(settings[0].facts)
    layers = list(settings[0].bits)
    scale = _scale(settings, samples, float_model)
    data = {
        "settings": [_stop(one, layers, samples, scale) for one in settings],
        "layers": layers,
        "most": max(bits for one in settings for bits, _ in one.bits.values()),
        "chosen": chosen,
    }
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")  # so that no text can end the element
    control = element("input", type="range", id="dial-range", min=0, max=len(settings) - 1, step=1, value=chosen)
    head = element(
        "div", element("label", "Setting", for_="dial-range"), element("output", id="dial-name"), class_="turn"
    )
    facts = element("div", _facts(names, samples, float_model))
    bars = element(
        "div",
        element("h3", "Bits by layer"),
        element("ul", id="dial-bars", class_="bars", tabindex=0, aria_label="Bits by layer"),
        element("p", "Quantised layers; the others stay in float at every setting.", class_="note"),
        _strip(scale, samples, float_model),
    )
    code = element("p", "In code: ", element("code", id="dial-code"))
    card = element(
        "div", head, control, _stops(settings), element("div", facts, bars, class_="read"), code, class_="card"
    )
    return element(
        "section",
        element("h2", "Turn the dial"),
        element(
            "p", "Move it with the mouse or the arrow keys: the file stays the same, the network changes its bits."
        ),
        card,
        element("script", text, type="application/json", id="dial-data"),
        id="dial",
        hidden=True,
    )


def bits_table(settings: Sequence[Setting]) -> Element:
    """The bits of every setting, for readers without scripts and for those who prefer a table."""
    layers = list(settings[0].bits)
    rows = [("Layer", *(one.name for one in settings))]
    rows += [(layer, *(_bits(one, layer) for one in settings)) for layer in layers]
    return unfolding("Bits of every setting as a table", table("Bits by layer", rows))


def _bits(one: Setting, layer: str) -> str:
    weights, activations = one.bits[layer]
    return f"{weights}" if weights == activations else f"{weights}:{activations}"


def _scale(settings: Sequence[Setting], samples: Samples, float_model: FloatModel | None) -> Plot:
    """The strip on which accuracies lie."""
    values = [one.accuracy for one in settings]
    values += [] if float_model is None or float_model.accuracy is None else [float_model.accuracy]
    ends = [end for value in values for end in samples.interval(value) or ()]
    return Plot("Accuracy and its interval, beside the float model's", 24, percent_scale([*values, *ends]))


def _stop(one: Setting, layers: list[str], samples: Samples, strip: Plot) -> dict[str, object]:
    interval = samples.interval(one.accuracy)
    low, high = interval or (one.accuracy, one.accuracy)
    places = [round(100 * strip.scale_x.at(100 * value), 2) for value in (low, one.accuracy, high)]
    return {
        "name": one.name,
        "title": f"{one.name}: {measured_text(one.accuracy, interval)}",
        "facts": [percent(one.accuracy), interval_text(interval), *one.facts.values()],
        "code": one.code,
        "layers": [(one.bits[layer][0], f"{_bits(one, layer)} bits") for layer in layers],
        "at": places,
    }


def _facts(names: list[str], samples: Samples, float_model: FloatModel | None) -> Element:
    """The table of one setting: page.js fills the cells of class `now`."""
    level = float_model.accuracy if float_model else None
    known = {} if float_model is None else dict(float_model.facts)
    beside = [
        "–" if level is None else percent(level),
        interval_text(None if level is None else samples.interval(level)),
    ]
    beside += [known.get(name, "–") for name in names]
    heads = ["", "At this setting", *(["Float"] if float_model else [])]
    rows = []
    for name, value in zip([f"Accuracy on {samples}", "95 % interval", *names], beside, strict=True):
        cells = [element("th", name, scope="row"), element("td", class_="now")]
        rows.append(element("tr", *cells, element("td", value) if float_model else None))
    head = element("tr", *(element("th", text, scope="col") if text else element("td") for text in heads))
    return element(
        "table", element("caption", "This setting"), element("thead", head), element("tbody", *rows), id="dial-facts"
    )


def _strip(plot: Plot, samples: Samples, float_model: FloatModel | None) -> Element:
    """Where the accuracy and its interval lie, over those of the float model."""
    plot.x_axis("accuracy (%)", [(tick, plot.scale_x.text(tick)) for tick in plot.scale_x.ticks(4) if 0 <= tick <= 100])
    keys = [("ink", ROUND, "this setting")]
    if float_model is not None and float_model.accuracy is not None:
        level = 100 * float_model.accuracy
        if found := samples.interval(float_model.accuracy):
            plot.axes.append(plot.bar(100 * found[0], 100 * found[1], 0, 24, "band"))
        plot.axes.append(plot.line(level, level, 0, 24, "level"))
        keys.append(("float", "M-7 0H7", "float"))
    plot.axes.append(element("line", id="dial-span", x1=0, x2=0, y1=12, y2=12, class_="span"))
    mark = element("path", d=ROUND, transform="translate(0 12)", class_="mark")
    plot.axes.append(element("svg", mark, id="dial-spot", x=0))
    return element("div", plot.svg, legend(*keys, interval_key(str(samples))), class_="strip")


def _stops(settings: Sequence[Setting]) -> Element:
    """The names below the control: all of them if they are few, else the first and the last."""
    last = max(len(settings) - 1, 1)
    shown = range(len(settings)) if len(settings) <= MOST_STOPS else (0, len(settings) - 1)
    return element(
        "div",
        *(element("span", settings[place].short, style=_left(100 * place / last)) for place in shown),
        class_="stops",
        aria_hidden="true",
    )


def _left(share: float) -> str:
    """The style of a name at `share` per cent of the width, which no end of it leaves."""
    return f"left:{share:.4g}%;transform:translateX(-{share:.4g}%)"
