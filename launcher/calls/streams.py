"""Output for a caller whose `sys.stdout` may not be standard output, as in a notebook or under a test runner."""

from __future__ import annotations

import errno
import sys
from contextlib import suppress
from typing import TextIO

from launcher.output.outlet import Outlet


class Streams(Outlet):
    """An outlet to `sys.stdout` and `sys.stderr`.

    It writes to the descriptors 1 and 2 if these are the streams of the process. A stream that has been replaced has a
    negative number here, and is written to at once.
    """

    def __init__(self) -> None:
        self._replaced: dict[int, TextIO | None] = {}
        numbers = []
        streams: tuple[tuple[int, TextIO | None, object], ...] = (
            (1, sys.stdout, sys.__stdout__),
            (2, sys.stderr, sys.__stderr__),
        )
        for number, stream, original in streams:
            if stream is not None and stream is original:
                with suppress(OSError, ValueError):
                    stream.flush()  # the caller's output comes before the job's
                numbers.append(number)
            else:
                self._replaced[-number] = stream
                numbers.append(-number)
        super().__init__(*numbers)
        self._unflushed: set[int] = set()

    def put(self, fd: int, lines: bytes) -> None:
        """Queue whole lines, or write them to a stream."""
        if fd not in self._replaced:
            super().put(fd, lines)
            return
        stream = self._replaced[fd]
        if not lines or stream is None or fd in self.broken:
            return
        try:
            stream.write(lines.decode(errors="replace"))
            self._unflushed.add(fd)
        except Exception as error:  # the replacement may raise anything
            self.broken[fd] = OSError(errno.EIO, str(error))

    def pump(self) -> None:
        """Write what can be written now."""
        for fd in self._unflushed:
            flush = getattr(self._replaced[fd], "flush", None)
            try:
                if flush is not None:
                    flush()
            except Exception as error:
                self.broken[fd] = OSError(errno.EIO, str(error))
        self._unflushed.clear()
        super().pump()
