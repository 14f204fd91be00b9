"""One page that shows a result: tables, figures and how to read them, in a single HTML file that loads nothing else.

write_report("report.html", title="A run", body=[
    table("Summary", [("bits", "accuracy"), ("4 bits", "99.2 %")]),
    figure("Accuracy", "The dashed line is the float model.", accuracy_by_bits(0.974, {4: 0.992}, samples)),
])
"""

import base64
import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree.ElementTree import Element

from bitdial._version import __version__
from bitdial.errors import BitdialError
from bitdial.files.atomic import replacing
from bitdial.report.charts import Chart
from bitdial.report.markup import element, items, table, to_html, unfolding

STYLE = Path(__file__).with_name("page.css")
SCRIPT = Path(__file__).with_name("page.js")


def write_report(path: str | os.PathLike[str], *, title: str, lead: str = "", body: Sequence[Element] = ()) -> None:
    """Write one self-contained HTML page to `path`, atomically; BitdialError if that fails.

    `lead` stands below the title, then `body`. Its one script is page.js: the page's policy lets no other run, and
    pictures only where `body` has some, inside the page.
    """
    style, script = (file.read_text(encoding="utf-8") for file in (STYLE, SCRIPT))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    images = "img-src data:; " if any(part.find(".//img") is not None for part in body) else ""
    policy = f"default-src 'none'; style-src 'unsafe-inline'; {images}script-src 'sha256-{digest}'"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("title", title),
        element("style", style),
    )
    main = element("main", element("h1", title), element("p", lead, class_="lead") if lead else None, *body)
    footer = element("footer", f"Made by bitdial {__version__}.")
    page = element("html", head, element("body", main, footer, element("script", script)), lang="en")
    with replacing(Path(path), error=BitdialError) as temporary:
        text = f"<!doctype html>\n{to_html(page)}\n"
        temporary.write_text(text, encoding="utf-8", errors="xmlcharrefreplace")


def figure(heading: str, caption: str, chart: Chart) -> Element:
    """A section: what the figure says, the figure, how to read it, and its numbers as a table."""
    return element(
        "section",
        element("h2", heading),
        element(
            "figure",
            element("p", chart.title, class_="finding"),
            chart.drawing,
            element("figcaption", caption),
            unfolding("The numbers as a table", table(heading, chart.rows)),
        ),
    )


def details(facts: Mapping[str, str]) -> Element:
    """A section of names and values."""
    pairs = [part for name, value in facts.items() for part in (element("dt", name), element("dd", value))]
    return element("section", element("h2", "Details"), element("dl", *pairs))


def remarks(notes: Sequence[str]) -> Element:
    """A section of plain sentences."""
    return element("section", element("h2", "Notes"), items(notes))
