"""What commands print: plain text, the same in a terminal, in a file and without colours."""

import shutil
import sys
import textwrap
from itertools import zip_longest
from typing import Any

from bitdial.cli.usage import printable
from bitdial.dial.plan import LayerBits

GAP = "   "
NARROWEST = 20  # of a column of text that is broken into lines


def show_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """Print a table; without names of columns, facts: names and texts. In a terminal, lines fit into it."""
    cells = [[printable(cell) for cell in row] for row in rows]
    print("\n".join([printable(title), *table_lines(columns, cells, _width()), ""]))


def table_lines(columns: list[str], rows: list[list[str]], width: int | None) -> list[str]:
    """The lines of a table of at most `width` characters, where words allow it: heads and facts are broken there."""
    if not any(columns):
        return _fact_lines(rows, width)
    cells = [max((len(row[i]) for row in rows), default=0) for i in range(len(columns))]
    heads = [[name] for name in columns]
    if width is not None and _total([max(n, len(c)) for n, c in zip(cells, columns, strict=True)]) > width:
        heads = [_broken(name, cell) for name, cell in zip(columns, cells, strict=True)]
    sizes = [max(cell, *map(len, head)) for cell, head in zip(cells, heads, strict=True)]
    tallest = max(map(len, heads))
    heads = [[""] * (tallest - len(head)) + head for head in heads]  # they stand on the rows
    table = [list(line) for line in zip(*heads, strict=True)] + rows
    return [_line(line, sizes) for line in table]


def _line(cells: list[str], sizes: list[int]) -> str:
    """The first cell on the left, the others on the right of their columns."""
    others = [cell.rjust(size) for cell, size in zip(cells[1:], sizes[1:], strict=True)]
    return GAP.join([cells[0].ljust(sizes[0]), *others]).rstrip()


def _fact_lines(rows: list[list[str]], width: int | None) -> list[str]:
    first = max(len(name) for name, _ in rows)
    room = None if width is None else max(width - first - len(GAP), NARROWEST)
    lines = []
    for name, text in rows:
        parts = [text] if room is None else textwrap.wrap(text, room, break_on_hyphens=False) or [""]
        lines += [f"{head.ljust(first)}{GAP}{part}".rstrip() for head, part in zip_longest([name], parts, fillvalue="")]
    return lines


def _broken(name: str, cell: int) -> list[str]:
    """The words of a head in lines as narrow as its column allows."""
    longest = max(map(len, name.split()), default=1)
    return textwrap.wrap(name, max(cell, longest), break_long_words=False, break_on_hyphens=False) or [""]


def _total(sizes: list[int]) -> int:
    return sum(sizes) + len(GAP) * (len(sizes) - 1)


def _width() -> int | None:
    """The characters in a line of the terminal; None where there is none, so that files have whole lines."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def setting_label(setting: LayerBits | str) -> str:
    """'4 bits', 'w4a8' or a plan's name."""
    if isinstance(setting, tuple):
        return f"w{setting[0]}a{setting[1]}"
    return f"{setting} bits" if isinstance(setting, int) else setting


def percent(value: object) -> str:
    """A share as '98.20 %'; nothing for what is not a number."""
    return f"{100 * value:.2f} %" if isinstance(value, int | float) else ""


def number(value: float) -> str:
    """A cost to read: whole numbers with commas, others with four digits."""
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def bits_text(bits: tuple[int, int]) -> str:
    """'4', or '4:8' where activation bits differ from weight bits."""
    return f"{bits[0]}" if bits[0] == bits[1] else f"{bits[0]}:{bits[1]}"


def stored_accuracies(metrics: dict[str, Any]) -> dict[str, Any]:
    """The accuracies by width that a file stores; none if it has something else in their place."""
    found = metrics.get("top1")
    return found if isinstance(found, dict) else {}
