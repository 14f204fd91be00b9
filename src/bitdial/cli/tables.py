"""What commands print."""

from typing import Any

from bitdial.dial.plan import LayerBits
from bitdial.errors import MissingDependencyError


def show_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """Print a table; without names of columns, one without a head."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError as problem:
        raise MissingDependencyError.missing("cli", "rich") from problem
    table = Table(title=title, show_header=any(columns), title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 or not any(columns) else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console().print(table, markup=False)


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
