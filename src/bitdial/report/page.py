"""One page that shows a result: tables, figures and how to read them, in a single HTML file that loads nothing else.

write_report("report.html", title="A run", summary_rows=[("bits", "accuracy"), ("4 bits", "99.2 %")], figures=[
    ("Accuracy", "The dashed line is the float model.", accuracy_by_bits(0.974, {8: 0.99, 4: 0.992})),
])
"""

import base64
import hashlib
import os
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from bitdial._version import __version__
from bitdial.errors import BitdialError, ConfigError
from bitdial.files.atomic import replacing
from bitdial.report import plots

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLE = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #fff; --ink: #1f2328; --quiet: #59636e; --line: #d8dde3; }
@media (prefers-color-scheme: dark) {
  :root { --page: #12161b; --card: #1b2128; --ink: #e8ebef; --quiet: #a2acb8; --line: #36404b; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.55 system-ui, sans-serif; }
main, footer { max-width: 56rem; margin: 0 auto; padding: 0 1.25rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 2.5rem 0 0.75rem; }
h2 { font-size: 1.2rem; line-height: 1.3; margin: 2.5rem 0 0.75rem; }
p, ul, dl { margin: 0.75rem 0; max-width: 46rem; }
.lead { font-size: 1.1rem; }
.wide { overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
caption { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
th, td { padding: 0.5rem 1rem; text-align: right; white-space: nowrap; border-top: 1px solid var(--line); }
th:first-child { text-align: left; }
th { font-weight: 600; }
thead th { white-space: normal; vertical-align: bottom; border-top: 0; color: var(--quiet); font-size: 0.875rem; }
figure { margin: 0; }
figure .wide { background: #fff; padding: 0.75rem; }
svg { display: block; width: 100%; min-width: 34rem; height: auto; }
svg text { font-family: system-ui, sans-serif !important; }
figcaption { margin: 0.75rem 0; max-width: 46rem; color: var(--quiet); font-size: 0.95rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0.35rem 1.25rem; }
dt { color: var(--quiet); }
dd { margin: 0; overflow-wrap: anywhere; min-width: 0; }
details { margin-bottom: 1.25rem; }
summary { cursor: pointer; margin: 0.75rem 0; }
select { font: inherit; padding: 0.25rem 0.5rem; max-width: 100%; }
.mark { cursor: pointer; }
.ring { fill: none; stroke: #1f2328; stroke-width: 2; pointer-events: none; }
.choice { display: grid; grid-template-columns: minmax(16rem, 2fr) 3fr; gap: 0 2rem; align-items: start; }
.choice dl { grid-template-columns: 1fr auto; gap: 0.35rem 1rem; }
.choice dd { text-align: right; font-variant-numeric: tabular-nums; }
.choice ul { list-style: none; padding: 0; font-size: 0.875rem; }
.choice li { display: grid; grid-template-columns: 11rem 1fr 4.5rem; gap: 0.75rem; align-items: center; }
.layer { overflow-wrap: anywhere; }
.track { background: var(--line); border-radius: 3px; }
.bar { display: block; height: 0.8rem; border-radius: 3px; }
footer { margin-top: 3rem; padding-bottom: 2rem; color: var(--quiet); font-size: 0.875rem; }
@media (max-width: 36rem) {
  th, td { padding: 0.45rem 0.6rem; font-size: 0.875rem; }
  dl { grid-template-columns: 1fr; gap: 0; }
  dd { margin-bottom: 0.5rem; }
  .choice { grid-template-columns: 1fr; }
  .choice li { grid-template-columns: 7rem 1fr 3.5rem; }
}
"""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'{allowed}">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
<h1>{title}</h1>
{body}
</main>
<footer>Made with bitdial {version}. This page is one file and loads nothing from elsewhere.</footer>
{script}</body>
</html>
"""


def write_report(
    path: str | os.PathLike[str],
    *,
    title: str,
    summary_rows: Sequence[Sequence[str]],
    figures: "Sequence[tuple[str, str, Figure]]",
    notes: Sequence[str] = (),
    lead: str = "",
    summary_note: str = "",
    facts: Mapping[str, str] | None = None,
    section: str = "",
    script: str = "",
) -> None:
    """Write one self-contained HTML page to `path`, atomically; BitdialError if that fails.

    `summary_rows` is a table: the names of the columns, then the rows, the first cell of each naming it. `figures` are
    (heading, caption, figure). `lead` stands below the title, `summary_note` below the table, `facts` and `notes` at
    the end. All text is plain text, except for `section`, HTML that stands above the table, and `script`, which is run
    when the page is there; no other script is.
    """
    parts = [
        f'<p class="lead">{text_html(lead)}</p>' if lead else "",
        section,
        table_html("Summary", summary_rows) if summary_rows else "",
        f"<p>{text_html(summary_note)}</p>" if summary_note else "",
        *(_figure(number, *entry) for number, entry in enumerate(figures, start=1)),
        _facts(facts) if facts else "",
        _notes(notes) if notes else "",
    ]
    body = "\n".join(filter(None, parts))
    page = PAGE.format(
        title=text_html(title),
        style=STYLE,
        body=body,
        version=text_html(__version__),
        script=f"<script>{script}</script>\n" if script else "",
        allowed=f"; script-src 'sha256-{_digest(script)}'" if script else "",
    )
    with replacing(Path(path), error=BitdialError) as temporary:
        temporary.write_text(page, encoding="utf-8", errors="xmlcharrefreplace")


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def text_html(text: str) -> str:
    """Plain text as HTML; a number stays on one line with its per cent sign."""
    return escape(text).replace(" %", "\u00a0%")


def table_html(name: str, rows: Sequence[Sequence[str]]) -> str:
    """A table as HTML: the names of the columns, then the rows, the first cell of each naming it."""
    if any(len(row) != len(rows[0]) for row in rows):
        raise ConfigError(f"the rows of the table {name!r} differ in length; each needs {len(rows[0])} cells")
    head = "".join(f'<th scope="col">{text_html(cell)}</th>' for cell in rows[0])
    body = "\n".join(
        f'<tr><th scope="row">{text_html(row[0])}</th>{"".join(f"<td>{text_html(cell)}</td>" for cell in row[1:])}</tr>'
        for row in rows[1:]
    )
    return (
        f'<div class="wide"><table><caption>{text_html(name)}</caption>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>"
    )


def _figure(number: int, heading: str, caption: str, figure: "Figure") -> str:
    svg = plots.to_svg(figure, prefix=f"figure{number}-")
    return (
        f'<section aria-labelledby="figure{number}">\n<h2 id="figure{number}">{text_html(heading)}</h2>\n'
        f'<figure><div class="wide">{svg}</div>\n<figcaption>{text_html(caption)}</figcaption></figure>\n</section>'
    )


def _facts(facts: Mapping[str, str]) -> str:
    entries = "\n".join(f"<dt>{text_html(name)}</dt><dd>{text_html(value)}</dd>" for name, value in facts.items())
    return f"<section><h2>Details</h2>\n<dl>\n{entries}\n</dl></section>"


def _notes(notes: Sequence[str]) -> str:
    entries = "\n".join(f"<li>{text_html(note)}</li>" for note in notes)
    return f"<section><h2>Notes</h2>\n<ul>\n{entries}\n</ul></section>"
