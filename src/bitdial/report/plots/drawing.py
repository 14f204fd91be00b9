"""What every figure has in common: the style, the colours of the widths, panels and axes, and how it is written out."""

import functools
import hashlib
import io
import math
import os
import re
import textwrap
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from bitdial.errors import BitdialError, ConfigError, MissingDependencyError
from bitdial.files.atomic import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

P = ParamSpec("P")
T = TypeVar("T")

# A colour for each width, after Okabe, Ito and Tol; told apart with any colour vision, and each width has a marker too.
PALETTE = {8: "#332288", 7: "#CC79A7", 6: "#56B4E9", 5: "#D55E00", 4: "#E69F00", 3: "#117733", 2: "#882255"}
MARKERS = {8: "o", 7: "v", 6: "s", 5: "P", 4: "D", 3: "X", 2: "^"}
LIGHT = (7, 6, 4)  # widths whose colour needs dark text on it
INK, GREY = "#1f2328", "#8a9099"
WIDTH = 8.0  # inches; 9 points are then about 13 pixels at the width of a page

STYLE: dict[str, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": GREY,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 9.5,
    "font.size": 9,
    "grid.color": "#e3e6ea",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "bitdial",
    "text.color": INK,
    "text.parse_math": False,
    "xtick.color": INK,
    "ytick.color": INK,
}


@contextmanager
def house_style() -> Iterator[None]:
    """The style of every figure; an error that names the extra if matplotlib is missing."""
    try:
        from matplotlib import style
    except ImportError as problem:
        raise MissingDependencyError.missing("report", "matplotlib") from problem
    with style.context(["default", STYLE]):
        yield


def require_matplotlib() -> None:
    """Raise an error that names the extra if matplotlib is missing: for long work that ends in a figure."""
    with house_style():
        pass


def drawing(make: "Callable[P, Figure]") -> "Callable[P, Figure]":
    """Run `make` in the house style and fix the layout, so that the figure is the same however often it is saved."""

    @functools.wraps(make)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> "Figure":
        with house_style():
            figure = make(*args, **kwargs)
            figure.draw_without_rendering()
            figure.set_layout_engine("none")
        return figure

    return drawn


def make_panels(
    title: str, count: int, *, columns: int = 1, height: float, foot: float = 0.4, **shared: Any
) -> "tuple[Figure, list[Axes]]":
    """A figure with a title, left-aligned, `count` axes in rows of `columns`, and `foot` inches below the rows."""
    from matplotlib.figure import Figure

    columns = min(columns, count)
    rows = math.ceil(count / columns)
    figure = Figure((WIDTH, 0.3 + height * rows + foot), layout="constrained")
    figure.suptitle(textwrap.fill(title, 88), x=0.01, ha="left", fontsize=11, fontweight="bold")
    axes = list(figure.subplots(rows, columns, squeeze=False, **shared).flat)
    for empty in axes[count:]:
        empty.remove()
    return figure, axes[:count]


def by_bits(values: Mapping[Any, T]) -> dict[int, T]:
    """`values` by width as a number, descending; ConfigError if there are none or a key is not a width."""
    found = {int(key) if str(key).isdecimal() else key: value for key, value in values.items()}
    if not found or any(bits not in PALETTE for bits in found):
        raise ConfigError(f"expected values by bit-width from 2 to 8, got the keys {list(values)}")
    return {bits: found[bits] for bits in sorted(found, reverse=True)}


def format_bytes(count: float) -> str:
    """A number of bytes to read: '112.5 kB'; 1 kB is 1000 bytes."""
    unit, size = unit_of(count)
    return f"{count / size:.{0 if size == 1 else 1}f} {unit}"


def unit_of(count: float) -> tuple[str, float]:
    """The unit to show a number of bytes in, and how many bytes it is."""
    units = {"bytes": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9}
    return next(((unit, size) for unit, size in units.items() if count < 999.95 * size), ("GB", 1e9))


def limit_percent(axes: "Axes", values: Sequence[float]) -> None:
    """Show all of `values` with room for labels, at least three points of accuracy and little above 100 %."""
    low, high = min(values), max(values)
    span = max(high - low, 2.0)
    bottom, top = max(low - 0.3 * span, -0.2 * span), min(high + 0.3 * span, 100 + 0.2 * span)
    axes.set_ylim(bottom, top)
    axes.set_yticks([tick for tick in axes.get_yticks() if max(bottom, 0) <= tick <= min(top, 100)])


def width_name(bits: int) -> str:
    """'4 bits'."""
    return f"{bits} bits"


def counted(number: int, noun: str) -> str:
    """'1 file', '1,000 files'."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def label_layers(axes: "Axes", names: list[str], *, bottom: bool) -> None:
    """Name the layers (of very many, some) below the lowest panel of a column, anchored at the axis in any font."""
    every = math.ceil(len(names) / 60)
    anchor: dict[str, Any] = {"rotation": 90, "rotation_mode": "anchor", "ha": "right", "va": "center"}
    axes.set_xticks(range(0, len(names), every), names[::every], fontsize=8, **anchor)
    axes.tick_params(axis="x", length=0, labelbottom=bottom)
    axes.set_xlim(-0.7, len(names) - 0.3)


def log_axis(axes: "Axes") -> None:
    """A logarithmic y axis labelled with whole powers of ten, as plain text."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(numticks=6))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: power_of_ten(value)))


def power_of_ten(value: float) -> str:
    """'10⁻³' as plain text, and '0'."""
    raised = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
    return "10" + f"{math.log10(value):.0f}".translate(raised) if value > 0 else "0"


def to_svg(figure: "Figure", *, prefix: str = "", label: str = "") -> str:
    """`figure` as an <svg> element to put into a page: no prolog, scales with the page, labelled for screen readers.

    Every id begins with `prefix`, by default one made from the content: give it where a page shows a figure twice.
    `label` describes the figure, by default with its title.
    """
    buffer = io.StringIO()
    with house_style():
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    prefix = prefix or f"f{hashlib.sha256(buffer.getvalue().encode()).hexdigest()[:10]}-"
    root = ElementTree.fromstring(buffer.getvalue())
    for element in root.iter():
        element.tag = _local(element.tag)
        element.attrib = {_local(k): _prefixed(_local(k), v, prefix) for k, v in element.attrib.items()}
        for child in [c for c in element if _local(c.tag) in ("metadata", "style")]:
            element.remove(child)
    del root.attrib["width"], root.attrib["height"]
    root.attrib |= {
        "xmlns": "http://www.w3.org/2000/svg",
        "role": "img",
        "aria-label": label or figure.get_suptitle().replace("\n", " "),
        "style": "stroke-linejoin: round; stroke-linecap: butt",  # what the removed style said, for this element only
    }
    return ElementTree.tostring(root, encoding="unicode")


def _local(name: str) -> str:
    return name.rpartition("}")[2]


def _prefixed(key: str, value: str, prefix: str) -> str:
    if key == "id":
        return prefix + value
    return re.sub(r"^#" if key == "href" else r"(?<=url\()#", f"#{prefix}", value)


def to_png(figure: "Figure", path: str | os.PathLike[str], *, dpi: int = 160) -> None:
    """Write `figure` to `path`, atomically; BitdialError if that fails."""
    with replacing(Path(path), error=BitdialError) as temporary, house_style():
        figure.savefig(temporary, format="png", dpi=dpi, metadata={"Software": None})
