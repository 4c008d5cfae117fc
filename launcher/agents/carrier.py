"""A program that starts agents on other hosts and runs as long as they do, such as ssh or mpirun."""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from kvstore.job.processes import Exit
from launcher.agents.links.link import PipeLink
from launcher.output.lines import Prefixer
from launcher.processes.child import Child, Program

_READ = 1 << 16
_REMEMBERED = 20  # lines
_POLL_S = 0.01
_GRACE_S = 1.0


class Carrier:
    """A program that runs from `open` on.

    The keeper does not know of it: it exits by itself when launch.py is gone.

    Args:
        name: its name in errors: "ssh to node1".
        linked: whether an agent answers on its standard streams. Otherwise what it prints is for people.
        source: the name to print before its lines; empty for the name of the agent's host.
    """

    def __init__(
        self, name: str, argv: Sequence[str], env: Mapping[str, str], *, linked: bool, source: str = ""
    ) -> None:
        self.source = source
        self.name = name
        self.link: PipeLink | None = None
        self._lines: deque[str] = deque(maxlen=_REMEMBERED)
        self._on_line: Callable[[str], None] | None = None
        self._streams: dict[int, Prefixer] = {}
        read, write = os.pipe() if linked else (None, None)
        try:
            self._child = Child(Program(name, argv, env), stdin=read)
        except BaseException:
            if write is not None:
                os.close(write)
            raise
        finally:
            if read is not None:
                os.close(read)
        self._texts = [self._child.stderr]
        if write is not None:
            self.link = PipeLink(self._child.stdout, write)
        else:
            self._texts.append(self._child.stdout)

    def open(self, selector: selectors.BaseSelector) -> None:
        """Execute it, and begin to read its output."""
        self._selector = selector
        for fd in self._texts:
            self._streams[fd] = Prefixer(b"")
            selector.register(fd, selectors.EVENT_READ, lambda fd=fd: self._read(fd))
        self._child.execute()

    def relay(self, on_line: Callable[[str], None]) -> None:
        """Pass every line to `on_line` from now on, instead of keeping it for `explanation`."""
        self._on_line = on_line

    def poll(self) -> Exit | None:
        """How it ended, or None while it runs."""
        return self._child.poll()

    def wait(self, seconds: float) -> Exit | None:
        """Wait for its exit, for so many seconds at most. Return how it ended; None if it has not."""
        deadline = time.monotonic() + seconds
        while (how := self.poll()) is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        for fd in list(self._streams):
            self._read(fd)
        return how

    @property
    def explanation(self) -> str:
        """The last lines that it has printed, if they were not relayed. Of a traceback, only the last line."""
        if self._on_line is not None:
            return ""
        lines = list(self._lines)
        for at, line in enumerate(lines):
            if line.startswith("Traceback ("):
                lines[at:] = lines[-1:]
                break
        return "\n".join(lines)

    def signal(self, signum: int) -> None:
        """Send a signal to it, and to the processes that it has started here."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child.pid, signum)

    def close(self, patience: float = 0.0) -> None:
        """Wait so many seconds for its exit, then send SIGTERM, then SIGKILL. May be called again."""
        for signum in (signal.SIGTERM, signal.SIGKILL):
            if self.wait(patience if signum == signal.SIGTERM else _GRACE_S) is not None:
                break
            self.signal(signum)
        self.wait(_GRACE_S)
        if self.link is not None:
            self.link.close()
        for fd in list(self._streams):
            self._finish(fd)
        self._child.reap()

    def _read(self, fd: int) -> None:
        if fd not in self._streams:
            return
        try:
            data = os.read(fd, _READ)
        except BlockingIOError:
            return
        self._say(self._streams[fd].feed(data))
        if not data:
            self._finish(fd)

    def _finish(self, fd: int) -> None:
        self._say(self._streams.pop(fd).finish())
        self._selector.unregister(fd)
        os.close(fd)

    def _say(self, lines: bytes) -> None:
        for line in lines.decode(errors="replace").splitlines():
            if not line.strip():
                continue
            self._lines.append(line.strip())
            if self._on_line is not None:
                self._on_line(line.rstrip())
