"""One drawing in SVG: x runs over the width of the page in per cent, y in pixels.

So a drawing is as wide as its page, on a telephone and on a screen, and its text keeps its size. Colours are classes
(`w4` is 4 bits): the page's style says what they look like in the light and in the dark.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from bitdial.report.markup import element
from bitdial.report.numbers import power_of_ten

# A shape for each width, around (0, 0): colours are not the only thing that tells widths apart.
SHAPES = {
    8: "M5 0A5 5 0 1 1-5 0A5 5 0 1 1 5 0Z",
    7: "M0 5.5L6-4.5H-6Z",
    6: "M-4.5-4.5H4.5V4.5H-4.5Z",
    5: "M-2-5.5H2V-2H5.5V2H2V5.5H-2V2H-5.5V-2H-2Z",
    4: "M0-6L6 0L0 6L-6 0Z",
    3: "M-5.5-3.5L-3.5-5.5L0-2L3.5-5.5L5.5-3.5L2 0L5.5 3.5L3.5 5.5L0 2L-3.5 5.5L-5.5 3.5L-2 0Z",
    2: "M0-5.5L6 4.5H-6Z",
}
DOT = "M2.5 0A2.5 2.5 0 1 1-2.5 0A2.5 2.5 0 1 1 2.5 0Z"
ROUND = SHAPES[8]


@dataclass(frozen=True)
class Scale:
    """A range of values along an axis, linear or logarithmic."""

    low: float
    high: float
    log: bool = False

    def at(self, value: float) -> float:
        """Where `value` lies, from 0 to 1; what lies beyond an end is at that end."""
        low, high = self.low, self.high
        if self.log:
            value, low, high = (math.log10(max(v, self.low)) for v in (value, low, high))
        return min(max((value - low) / (high - low), 0.0), 1.0)

    def text(self, value: float) -> str:
        """A tick's text, short: '−0.2', '12,000', '2.5 M'."""
        if self.log:
            return power_of_ten(value)
        unit, size = next(((u, s) for u, s in (("\u00a0G", 1e9), ("\u00a0M", 1e6)) if abs(value) >= s), ("", 1.0))
        number = float(f"{value / size:.9g}")  # 0.3, not 0.30000000000000004
        return (f"{number:,.0f}" if number.is_integer() else f"{number:.6g}").replace("-", "−") + unit

    def ticks(self, about: int = 5) -> list[float]:
        """Round values within the range: whole powers of ten on a logarithmic axis, else 1, 2 or 5 of one apart."""
        if self.log:
            first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            return [10.0**power for power in range(first, last + 1, max(math.ceil((last - first + 1) / about), 1))]
        rough = (self.high - self.low) / about
        unit = 10 ** math.floor(math.log10(rough))
        step = unit * next(factor for factor in (1, 2, 5, 10) if factor * unit >= 0.8 * rough)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [number * step for number in range(first, last + 1)]


def percent_scale(values: Sequence[float]) -> Scale:
    """A scale for accuracies (0 to 1) in per cent: room around them, at least two points, and little beyond 100."""
    low, high = 100 * min(values), 100 * max(values)
    span = max(high - low, 2.0)
    return Scale(max(low - 0.2 * span, -0.1 * span), min(high + 0.2 * span, 100 + 0.1 * span))


def log_scale(values: Sequence[float]) -> Scale:
    """A logarithmic scale around `values`, all above 0, with at least two whole powers of ten on it."""
    low, high = min(values) / 1.5, max(values) * 1.5
    if len(Scale(low, high, log=True).ticks()) < 2:
        low, high = 10.0 ** math.floor(math.log10(low)), 10.0 ** math.ceil(math.log10(high))
    return Scale(low, high, log=True)


class Plot:
    """A drawing of `height` pixels. `x` and `y` are its scales; y counts from the foot."""

    def __init__(self, label: str, height: float, x: Scale, y: Scale | None = None):
        self.height, self.scale_x, self.scale_y = height, x, y or Scale(0, 1)
        self.svg = element("svg", class_="plot", role="group", aria_label=label, width="100%", height=height)
        self.axes = element("g", class_="axes", aria_hidden="true")
        self.svg.append(self.axes)

    def x(self, value: float) -> str:
        """The place of `value` along the width."""
        return f"{100 * self.scale_x.at(value):.4g}%"

    def y(self, value: float) -> float:
        """The place of `value` in pixels from the top."""
        return self.height * (1 - self.scale_y.at(value))

    # --- axes -------------------------------------------------------------------------------------

    def y_axis(self, label: str, ticks: Sequence[float] | None = None) -> None:
        """Lines across, their values on the left, and what they are above."""
        for value in self.scale_y.ticks() if ticks is None else ticks:
            y = self.y(value)
            self.axes.append(element("line", x2="100%", y1=y, y2=y, class_="grid"))
            self.axes.append(element("text", self.scale_y.text(value), x=-8, y=y + 4, class_="end"))
        self.axes.append(element("text", label, x=-36, y=-14, class_="quiet"))

    def x_axis(self, label: str, ticks: Sequence[tuple[float, str]] | None = None, *, top: bool = False) -> None:
        """Values along the foot, or the top, and what they are."""
        if ticks is None:
            ticks = [(value, self.scale_x.text(value)) for value in self.scale_x.ticks(5 if self.scale_x.log else 4)]
        for value, text in ticks:
            x = self.x(value)
            if top:
                self.axes.append(element("line", x1=x, x2=x, y1=-4, y2=self.height, class_="grid"))
            self.axes.append(element("text", text, x=x, y=-10 if top else self.height + 18, class_="middle"))
        place = -28 if top else self.height + 36
        self.axes.append(element("text", label, x="50%", y=place, class_="middle quiet"))
        self.axes.append(element("line", x2="100%", y1=self.height, y2=self.height, class_="axis"))

    # --- marks ------------------------------------------------------------------------------------

    def point(self, css: str, tip: str, *shapes: Element, setting: int | None = None) -> None:
        """Something to point at, or to reach by keyboard: `tip` says what it is; `setting` is one of the dial's."""
        self.svg.append(element("g", element("title", tip), *shapes, class_=f"point {css}", data_setting=setting))

    def at(self, x: float, *shapes: Element) -> Element:
        """Shapes whose own coordinates are pixels, moved to `x`."""
        return element("svg", *shapes, x=self.x(x))

    def shape(self, y: float, path: str, *, size: float = 1.0) -> Element:
        """A mark at `y`, for `at`."""
        smaller = "" if size == 1 else f" scale({size:g})"
        return element("path", d=path, transform=f"translate(0 {self.y(y):.1f}){smaller}", class_="mark")

    def ring(self, y: float) -> Element:
        """What shows that the dial is at a mark, for `at`; hidden until then."""
        return element("circle", cy=self.y(y), r=10, class_="ring")

    def whisker(self, low: float, high: float) -> Element:
        """An upright error bar, for `at`."""
        top, foot = round(self.y(high), 1), round(self.y(low), 1)
        return element("path", d=f"M0 {top}V{foot}M-5 {top}H5M-5 {foot}H5", class_="whisker")

    def bar(self, left: float, right: float, y: float, height: float, css: str = "") -> Element:
        """A box from `left` to `right`, `height` pixels high, its upper side at `y` pixels."""
        share = 100 * (self.scale_x.at(right) - self.scale_x.at(left))
        return element("rect", x=self.x(left), width=f"{share:.4g}%", y=y, height=height, class_=css or None)

    def line(self, x1: float, x2: float, y1: float, y2: float, css: str) -> Element:
        """A straight line; y in pixels."""
        return element("line", x1=self.x(x1), x2=self.x(x2), y1=y1, y2=y2, class_=css)

    def curve(self, points: Sequence[tuple[float, float]], css: str, *, steps: bool = False) -> None:
        """A line through `points`; with `steps`, each holds until the next."""
        places = [(f"{100 * self.scale_x.at(x):.4g}", f"{self.y(y):.4g}") for x, y in points]
        first, *rest = places
        path = f"M{first[0]} {first[1]}"
        path += "".join(f"H{x}V{y}" if steps else f"L{x} {y}" for x, y in rest)
        inner = element("path", d=path, class_=f"curve {css}")
        box = f"0 0 100 {self.height:g}"
        stretched = {"viewBox": box, "preserveAspectRatio": "none", "width": "100%", "height": self.height}
        self.svg.append(element("svg", inner, aria_hidden="true", **stretched))

    def text(self, text: str, x: str, y: float, css: str = "") -> None:
        """Words at `x` (a share of the width) and `y` pixels."""
        self.svg.append(element("text", text, x=x, y=y, class_=css or None))


@dataclass(frozen=True)
class Chart:
    """A figure: what it shows in a sentence, the drawing, and the same numbers as a table."""

    title: str
    drawing: Element
    rows: Sequence[tuple[str, ...]]


def frame(plot: Plot, kind: str = "") -> Element:
    """Room around a plot for its axes; `kind` is 'rows' for one whose rows carry their names."""
    return element("div", plot.svg, class_=f"frame {kind}".strip())


def legend(*entries: tuple[str, str, str]) -> Element:
    """What the marks mean: (class, path of a mark, text)."""
    return element(
        "ul",
        *(
            element("li", element("svg", element("path", d=path, class_="mark"), class_=f"key {css}"), text)
            for css, path, text in entries
        ),
        class_="legend",
    )


def interval_key(name: str, answers: str = "right") -> tuple[str, str, str]:
    """The legend's entry for error bars of shares of `answers` on `name`, such as '500 test images'."""
    return "quiet-key", "M0-6V6M-4-6H4M-4 6H4", f"95 % interval (Wilson) of {answers} answers out of {name}"


def card(*parts: Element) -> Element:
    """Drawings on their own ground."""
    return element("div", *parts, class_="card")
