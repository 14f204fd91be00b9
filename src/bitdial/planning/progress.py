"""How far a long search is: a bar if rich is there, else nothing."""

import logging
from collections.abc import Iterator, Sequence
from typing import TypeVar

log = logging.getLogger(__name__)
Item = TypeVar("Item")


def tracked(items: Sequence[Item], label: str, *, show: bool) -> Iterator[Item]:
    """Go through `items`, with a bar if asked for and rich is there."""
    if show and items:
        try:
            from rich.console import Console
            from rich.progress import track
        except ImportError:
            log.info("rich is not installed, so there is no progress bar; pip install 'bitdial[cli]' brings it")
        else:
            yield from track(items, description=label, console=Console(stderr=True))
            return
    yield from items
