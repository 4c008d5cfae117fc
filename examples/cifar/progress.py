"""What the user sees: log lines as MXNet prints them, with a progress bar below them on a terminal."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rich.console import Console

Item = TypeVar("Item")


class Progress:
    """Sets up logging, and draws a bar if standard error is a terminal and rich is installed."""

    def __init__(self) -> None:
        self._console = _terminal()
        handler = ConsoleHandler(self._console) if self._console else logging.StreamHandler()
        logging.basicConfig(level=logging.INFO, handlers=[handler])

    def track(self, items: Iterable[Item], total: int, title: str) -> Iterator[Item]:
        """The items, counted on the bar as they are taken."""
        if not self._console:
            yield from items
            return
        from rich.progress import track

        yield from track(items, title, total, console=self._console, transient=True)


class ConsoleHandler(logging.Handler):
    """Prints plain lines above the bar."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record."""
        self._console.print(self.format(record), markup=False, highlight=False, soft_wrap=True)


def _terminal() -> Console | None:
    if not sys.stderr.isatty():
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(stderr=True)
