"""Writes the lines of many processes to standard output and standard error, and never waits for a reader."""

from __future__ import annotations

import os
import select
import stat
from collections import deque
from collections.abc import Hashable

from launcher.output.status_line import StatusLine

# What a writable pipe takes without blocking, in bytes.
_CHUNK = 4096


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


def _is_file(fd: int) -> bool:
    try:
        return stat.S_ISREG(os.fstat(fd).st_mode)
    except OSError:
        return True  # closed: the first write says so
