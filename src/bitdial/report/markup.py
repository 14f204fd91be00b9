"""HTML and SVG as elements: what is written is well-formed, and text is escaped by the writer, never by hand.

to_html(element("p", "4 bits: ", element("b", "99.0 %"), class_="lead"))
"""

import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Sequence
from xml.etree.ElementTree import Element

from bitdial.errors import ConfigError

RAW = ("script", "style")  # HTML takes what is in these as it is


def element(tag: str, /, *children: Element | str | None, **attributes: object) -> Element:
    """An element. `class_` and `aria_label` become class and aria-label; what is None or False is left out."""
    given = {_name(key): _value(value) for key, value in attributes.items() if value is not None and value is not False}
    made = Element(tag, given)
    last: Element | None = None
    for child in children:
        if isinstance(child, Element):
            made.append(child)
            last = child
        elif child is not None:
            text = child if tag in RAW else child.replace(" %", "\u00a0%")  # a number keeps its sign on its line
            if last is None:
                made.text = (made.text or "") + text
            else:
                last.tail = (last.tail or "") + text
    return made


def _name(key: str) -> str:
    return key.rstrip("_").replace("_", "-")


def _value(value: object) -> str:
    if value is True:
        return ""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def to_html(root: Element) -> str:
    """`root` as the text of a page."""
    return ElementTree.tostring(root, encoding="unicode", method="html")


def table(name: str, rows: Sequence[Sequence[str]]) -> Element:
    """A table that scrolls in itself: the names of the columns, then the rows, the first cell of each naming it."""
    if any(len(row) != len(rows[0]) for row in rows):
        raise ConfigError(f"the rows of the table {name!r} differ in length; each needs {len(rows[0])} cells")
    head = element("tr", *(element("th", cell, scope="col") for cell in rows[0]))
    body = (
        element("tr", element("th", row[0], scope="row"), *(element("td", cell) for cell in row[1:]))
        for row in rows[1:]
    )
    whole = element("table", element("caption", name), element("thead", head), element("tbody", *body))
    return element("div", whole, class_="wide", role="region", aria_label=name, tabindex=0)


def unfolding(summary: str, *children: Element) -> Element:
    """What the reader may open."""
    return element("details", element("summary", summary), *children)


def items(texts: Iterable[str]) -> Element:
    """A list of plain texts."""
    return element("ul", *(element("li", text) for text in texts))
