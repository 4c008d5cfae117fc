"""Output whose terminal shows a status line: what ends with a carriage return is rewritten, and is no line."""

from __future__ import annotations

import re

from launcher.output.lines import MAX_LINE, Prefixer

_SEGMENT = re.compile(rb"([^\r\n]*)(\r*\n|\r+|\Z)")


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
        """The lines that `data` completes."""
        lines = []
        for text, end in _SEGMENT.findall(data):
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
        """The last line, if it has no newline."""
        rest = self._text or self._status.rstrip()
        self._text = self._status = b""
        return super().feed(rest + b"\n") if rest else b""
