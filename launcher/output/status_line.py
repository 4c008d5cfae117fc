"""What is below all lines of a terminal: text that is rewritten, such as a progress bar. No I/O."""

from __future__ import annotations

import re
from collections.abc import Hashable

ERASE = b"\r\x1b[K"
# A text that is wider than the terminal must not wrap, or ERASE would leave its beginning.
_NO_WRAP, _WRAP = b"\x1b[?7l", b"\x1b[?7h"
_RESET = b"\x1b[0m"
_MOVES = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-ln-~]")  # escape sequences but for colors: they could reach other lines


class StatusLine:
    """The one status that is shown, of all that there are."""

    def __init__(self) -> None:
        self._statuses: dict[Hashable, bytes] = {}
        self._drawn = b""

    def set(self, source: Hashable, text: bytes) -> None:
        """Set the status of a source, of one line or several; empty for none.

        The source that has one for the longest is shown.
        """
        if text:
            self._statuses[source] = text
        else:
            self._statuses.pop(source, None)

    def make_room(self) -> bytes:
        """What to write before other lines."""
        drawn, self._drawn = self._drawn, b""
        if above := drawn.count(b"\n"):
            return b"\r\x1b[%dA\x1b[J" % above
        return ERASE if drawn else b""

    def draw(self) -> bytes:
        """What to write when all lines have been written; empty if nothing has changed."""
        wanted = next(iter(self._statuses.values()), b"")
        if wanted == self._drawn:
            return b""
        erase, self._drawn = self.make_room(), wanted
        return erase + (_NO_WRAP + _MOVES.sub(b"", wanted) + _RESET + _WRAP if wanted else b"")
