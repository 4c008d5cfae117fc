"""Output as whole lines, each with the name of its process, and no byte lost. No I/O."""

from __future__ import annotations

import re
from collections.abc import Callable

# The longest line, in bytes. A longer one is split, or one process could fill the memory.
MAX_LINE = 16 << 20

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
        rest = b"".join(self._partial)
        self._partial, self._held = [], 0
        return self._prefixed(rest) if rest else b""

    @classmethod
    def into(cls, on_lines: Callable[[bytes], None]) -> Callable[[bytes], None]:
        """Return what takes the data of a stream, empty at its end, and passes on the lines that are whole."""
        lines = cls(b"")
        return lambda data: on_lines(lines.feed(data) if data else lines.finish())

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


def prefix(name: str, index: int, color: bool) -> bytes:
    """The prefix of the lines of a process: its name, in a color that its index in the job selects."""
    if not color:
        return f"[{name}] ".encode()
    # It begins with a reset, because the line before may have set a color.
    return f"\x1b[0;{_COLORS[index % len(_COLORS)]}m[{name}]\x1b[0m ".encode()


_STATUS_SEGMENT = re.compile(rb"([^\r\n]*)(\r*\n|\r+|\Z)")


class StatusPrefixer(Prefixer):
    """A `Prefixer` for a terminal: a carriage return makes the text before it the status of the process.

    A status goes when it is rewritten with blanks, and when the process writes a line. The last one becomes a line at
    the end of the stream, or by a newline that follows the carriage return.
    """

    def __init__(self, prefix: bytes) -> None:
        super().__init__(prefix)
        self._name = prefix
        self._text = b""  # what the next carriage return or newline ends
        self._status = b""

    @property
    def status(self) -> bytes:
        """The status with its prefix; empty if there is none."""
        return self._name + self._status if self._status.strip() else b""

    def feed(self, data: bytes) -> bytes:
        lines = []
        for text, end in _STATUS_SEGMENT.findall(data):
            self._text += text
            if end.endswith(b"\n"):
                lines.append((self._text or self._status) + b"\n")
                self._text = self._status = b""
            elif end and self._text:
                self._text, self._status = b"", self._text
        if len(self._text) > MAX_LINE:
            lines.append(self._text + b"\n")
            self._text = b""
        return super().feed(b"".join(lines))

    def finish(self) -> bytes:
        rest = self._text or self._status.rstrip()
        self._text = self._status = b""
        return super().feed(rest + b"\n") if rest else b""
