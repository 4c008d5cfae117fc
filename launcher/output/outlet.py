"""Writes the lines of many processes to standard output and standard error, and never waits for a reader.

Below all lines of a terminal there may be a status: text that is rewritten, such as a progress bar.
"""

from __future__ import annotations

import os
import re
import select
import stat
from collections import deque
from collections.abc import Hashable, Mapping

from kvstore.job.settings import NO_COLOR

# What a writable pipe takes without blocking, in bytes.
_CHUNK = 4096


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
        """Set the status of a source, one line; empty for none.

        The source that has one for the longest is shown.
        """
        if text:
            self._statuses[source] = text
        else:
            self._statuses.pop(source, None)

    def make_room(self) -> bytes:
        """What to write before other lines."""
        drawn, self._drawn = self._drawn, b""
        return ERASE if drawn else b""

    def draw(self) -> bytes:
        """What to write when all lines have been written; empty if nothing has changed."""
        wanted = next(iter(self._statuses.values()), b"")
        if wanted == self._drawn:
            return b""
        erase, self._drawn = self.make_room(), wanted
        return erase + (_NO_WRAP + _MOVES.sub(b"", wanted) + _RESET + _WRAP if wanted else b"")


class Outlet:
    """Writes to standard output and standard error from one queue.

    Both may be the same terminal, so each line is written whole before the next one begins. `pump` never blocks: a slow
    reader, or a stopped terminal, does not keep launch.py from ending a job.
    """

    def __init__(self, stdout: int = 1, stderr: int = 2) -> None:
        self.stdout, self.stderr = stdout, stderr
        self.pending = 0
        self.broken: dict[int, OSError] = {}
        self._queue: deque[tuple[int, memoryview]] = deque()
        self._never_blocks = {fd for fd in (stdout, stderr) if _is_file(fd)}
        self._terminals = {fd for fd in (stdout, stderr) if os.isatty(fd)}
        self._status, self._status_fd = StatusLine(), stderr

    def put(self, fd: int, lines: bytes) -> None:
        if lines and fd not in self.broken:
            self._append(fd, self._status.make_room() + lines if fd in self._terminals else lines)

    def show(self, fd: int, source: Hashable, status: bytes) -> None:
        """Show the status of a source below all lines on a terminal; an empty one ends it."""
        self._status_fd = fd
        self._status.set(source, status)

    def pump(self) -> None:
        """Write what can be written now. After an error a descriptor is in `broken`, and its lines are dropped."""
        while self._queue or self._draw():
            fd, data = self._queue[0]
            free = fd in self._never_blocks
            if fd not in self.broken:
                if not free and not select.select([], [fd], [], 0)[1]:
                    return
                try:
                    written = os.write(fd, data if free else data[:_CHUNK])
                except BlockingIOError:
                    return
                except OSError as error:
                    self.broken[fd] = error
            if fd in self.broken:
                written = len(data)
            self.pending -= written
            if written == len(data):
                self._queue.popleft()
            else:
                self._queue[0] = (fd, data[written:])

    def _draw(self) -> bool:
        status = b"" if self._status_fd in self.broken else self._status.draw()
        if status:
            self._append(self._status_fd, status)
        return bool(status)

    def _append(self, fd: int, data: bytes) -> None:
        self._queue.append((fd, memoryview(data)))
        self.pending += len(data)

    @property
    def waits_for(self) -> int | None:
        """The descriptor that must become writable before `pump` can go on."""
        return self._queue[0][0] if self._queue else None


def _is_file(fd: int) -> bool:
    try:
        return stat.S_ISREG(os.fstat(fd).st_mode)
    except OSError:
        return True  # closed: the first write says so


# The size of a terminal that does not know its own.
_COLUMNS = 80


def wants_color(fd: int, environ: Mapping[str, str]) -> bool:
    """Whether a descriptor is a terminal with colors, and the user wants them (https://no-color.org)."""
    return not environ.get(NO_COLOR.name) and is_terminal(fd, environ)


def is_terminal(fd: int, environ: Mapping[str, str]) -> bool:
    """Whether a descriptor is a terminal that can erase a line."""
    return environ.get("TERM") != "dumb" and os.isatty(fd)


def columns(fd: int, environ: Mapping[str, str]) -> int:
    if not is_terminal(fd, environ):
        return 0
    try:
        return os.get_terminal_size(fd).columns or _COLUMNS
    except OSError:  # it has been closed
        return _COLUMNS
