"""Where ``kvstore-status`` writes: lines one below the other, or on a terminal, if it is to be watched, in place."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from typing import TextIO

from kvstore.job.settings import NO_COLOR
from kvstore.observing.columns import TextLine

_CODES = {"title": "1", "bad": "31", "odd": "33", "faint": "2"}  # ECMA-48 "select graphic rendition"
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"  # the alternate screen, without a cursor
_HOME, _REST_OF_LINE, _REST = "\x1b[H", "\x1b[K", "\x1b[J"


class StatusScreen:
    """See the module.

    Args:
        out: where to write.
        in_place: whether each text replaces the one before, if ``out`` is a terminal.
        env: the environment, which may refuse colors.
    """

    def __init__(self, out: TextIO, in_place: bool = False, env: Mapping[str, str] = os.environ) -> None:
        self._out = out
        terminal = out.isatty() and env.get("TERM", "") != "dumb"
        self._in_place = in_place and terminal
        self._colors = terminal and not NO_COLOR.read(env)
        self._written = 0

    def __enter__(self) -> StatusScreen:
        if self._in_place:
            self._out.write(_ENTER)
        return self

    def __exit__(self, *_: object) -> None:
        if self._in_place:
            self._out.write(_LEAVE)
            self._out.flush()

    def show(self, lines: Sequence[TextLine]) -> None:
        """Write ``lines``: below what was written before, or in its place."""
        if self._in_place:
            columns, rows = shutil.get_terminal_size()
            shown = [self._painted(line, columns) + _REST_OF_LINE for line in lines[:rows]]
            self._out.write(_HOME + "\n".join(shown) + _REST)
        else:
            before = "\n" if self._written else ""
            self._out.write(before + "".join(self._painted(line) + "\n" for line in lines))
        self._written += 1
        self._out.flush()

    def _painted(self, line: TextLine, width: int | None = None) -> str:
        text = printable(line.text)[:width]
        code = _CODES.get(line.style) if self._colors else None
        return text if code is None or not text else f"\x1b[{code}m{text}\x1b[0m"


def printable(text: str) -> str:
    """Return ``text`` without what a terminal would obey: names of keys and of functions may hold anything."""
    return "".join(character if character.isprintable() else "?" for character in text)
