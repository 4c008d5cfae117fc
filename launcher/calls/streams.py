"""Output for a caller whose `sys.stdout` may not be standard output: in a notebook, under a test runner."""

from __future__ import annotations

import errno
import sys
from contextlib import suppress
from typing import TextIO

from launcher.supervision.output import Outlet


class Streams(Outlet):
    """An outlet to `sys.stdout` and `sys.stderr`; to the descriptors 1 and 2 only where those are what they write to.

    A stream that has been put in their place has a negative number, and is written to at once.
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
                    stream.flush()  # what the caller has printed stands before what the job prints
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
        except Exception as error:  # whatever it is that stands in for a file
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
