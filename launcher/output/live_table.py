"""Draws the lines of `--live`, with rich."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from launcher.errors import LaunchError
from launcher.output.lines import color_of
from launcher.output.live import ENDED, FAILED, RESTARTED, LiveRow

if TYPE_CHECKING:
    from rich.text import Text

BESIDE = 40  # columns beside the last line of a process, about, without its host
LONGEST_HOST = 20  # columns
_STYLES: Mapping[str, str] = {ENDED: "dim", FAILED: "bold red", RESTARTED: "yellow"}
_LONGEST = 2000  # bytes of a line that are looked at
# Escape sequences but for colors, an incomplete one at the end, and other control characters.
_UNSHOWN = re.compile(r"\x1b\[[0-?]*[ -/]*[@-ln-~]|\x1b\[[0-?]*\Z|\x1b(?!\[)|[\x00-\x08\x0a-\x1a\x1c-\x1f\x7f-\x9f]")


def require_rich() -> None:
    """Check that the lines can be drawn.

    Raises:
        LaunchError: rich is not installed.
    """
    if find_spec("rich") is None:
        raise LaunchError("--live needs rich, which is not installed: pip install 'torch-kvstore[live]'", exit_code=1)


class LiveTable:
    """Draws lines.

    Args:
        color: whether the terminal has colors, and the user wants them.
    """

    def __init__(self, color: bool) -> None:
        self._color = color

    def draw(self, rows: Sequence[LiveRow], rest: str, width: int) -> bytes:
        """The lines of a terminal, without a newline at their end.

        Args:
            rows: a line for each process.
            rest: a line about the others; empty for none.
            width: of the terminal, in columns.
        """
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim", width=width)
        hosts = any(row.host for row in rows)
        for title in ("process", *(["host"] if hosts else []), "state", "for", "silent"):
            table.add_column(
                title,
                no_wrap=True,
                overflow="ellipsis",
                max_width=LONGEST_HOST,
                justify="right" if title in ("for", "silent") else "left",
            )
        table.add_column("last line", no_wrap=True, overflow="ellipsis", ratio=1)
        for row in rows:
            style = _STYLES.get(row.state, "")
            name = Text(row.name, style=f"color({color_of(row.task)})")
            host = [Text(row.host)] if hosts else []
            table.add_row(name, *host, Text(row.state, style=style), row.lasting, row.silent, self._text(row.text))
        file = io.StringIO()
        console = Console(
            file=file,
            width=width,
            force_terminal=self._color,
            color_system="256" if self._color else None,
            highlight=False,
        )
        console.print(table)
        if rest:
            console.print(Text(rest, style="dim", no_wrap=True, overflow="ellipsis"))
        return b"\n".join(line.rstrip().encode() for line in file.getvalue().splitlines())

    def _text(self, line: bytes) -> Text:
        from rich.text import Text

        readable = _UNSHOWN.sub("", line[:_LONGEST].decode(errors="replace").expandtabs())
        text = Text.from_ansi(readable, no_wrap=True, overflow="ellipsis")
        return text if self._color else Text(text.plain, no_wrap=True, overflow="ellipsis")
