"""Merges the output of many processes: whole lines, each with the name of its process, and no byte lost."""

from __future__ import annotations

import os
import re
import select
import stat
from collections import deque
from collections.abc import Hashable, Mapping

from kvstore.job.settings import NO_COLOR
from launcher.supervision.status_line import StatusLine

# The longest line, in bytes. A longer one is split, or one process could fill the memory.
MAX_LINE = 16 << 20
# What a writable pipe takes without blocking, in bytes.
_CHUNK = 4096
# The width of a terminal that does not know its own.
_COLUMNS = 80

_SEGMENT = re.compile(rb"([^\r\n]*)(\r\n|\r|\n|\Z)")
# Cyan, green, magenta, yellow, blue, and the bright ones. Red is for errors, black and white are backgrounds.
_COLORS = (36, 32, 35, 33, 34, 96, 92, 95, 93, 94)


class Prefixer:
    """Puts a prefix before each line of one stream. Bytes go in, whole lines come out.

    A carriage return ends a line, as a newline does. So a progress bar, which rewrites its line, comes out as lines.
    Empty lines of this kind are dropped.
    """

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix
        self._partial: list[bytes] = []
        self._held = 0
        self._after_return = False  # a carriage return has ended the line that a newline would end now

    def feed(self, data: bytes) -> bytes:
        """The lines that `data` completes."""
        if b"\r" in data or self._after_return:
            data = self._without_returns(data)
        whole, newline, rest = data.rpartition(b"\n")
        lines = b""
        if newline:
            lines = self._prefixed(b"".join(self._partial) + whole)
            self._partial, self._held = [], 0
        if rest:
            self._partial.append(rest)
            self._held += len(rest)
        return lines if self._held <= MAX_LINE else lines + self.finish()

    def finish(self) -> bytes:
        """The last line, if it has no newline."""
        rest = b"".join(self._partial)
        self._partial, self._held = [], 0
        return self._prefixed(rest) if rest else b""

    def _prefixed(self, lines: bytes) -> bytes:
        return self._prefix + lines.replace(b"\n", b"\n" + self._prefix) + b"\n"

    def _without_returns(self, data: bytes) -> bytes:
        pieces = []
        started = bool(self._partial)
        for text, end in _SEGMENT.findall(data):
            started = started or bool(text)
            if text:
                pieces.append(text)
                self._after_return = False
            if end == b"\r":
                if started:
                    pieces.append(b"\n")
                    self._after_return = True
            elif end:
                if not self._after_return or started:
                    pieces.append(b"\n")
                self._after_return = False
            if end:
                started = False
        return b"".join(pieces)


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
        """Queue whole lines for a descriptor."""
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
        """Queue the status if it has changed; a slow terminal gets the latest one alone."""
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


def prefix(name: str, index: int, color: bool) -> bytes:
    """The prefix of the lines of a process: its name, in a color that its index in the job selects."""
    if not color:
        return f"[{name}] ".encode()
    # It begins with a reset, because the line before may have set a color.
    return f"\x1b[0;{_COLORS[index % len(_COLORS)]}m[{name}]\x1b[0m ".encode()


def wants_color(fd: int, environ: Mapping[str, str]) -> bool:
    """Whether a descriptor is a terminal with colors, and the user wants them (https://no-color.org)."""
    return not environ.get(NO_COLOR.name) and is_terminal(fd, environ)


def is_terminal(fd: int, environ: Mapping[str, str]) -> bool:
    """Whether a descriptor is a terminal that can erase a line."""
    return environ.get("TERM") != "dumb" and os.isatty(fd)


def columns(fd: int, environ: Mapping[str, str]) -> int:
    """The width of a terminal that can erase a line; 0 for anything else."""
    if not is_terminal(fd, environ):
        return 0
    return os.get_terminal_size(fd).columns or _COLUMNS


def _is_file(fd: int) -> bool:
    try:
        return stat.S_ISREG(os.fstat(fd).st_mode)
    except OSError:
        return True  # closed: the first write says so
