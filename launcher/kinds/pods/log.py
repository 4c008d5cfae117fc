"""The output of one pod, from `kubectl logs --timestamps`, which may end before the pod does. No I/O."""

from __future__ import annotations

import re

_STAMP = re.compile(rb"((\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)\.?(\d*)(?:Z|[+-]\d\d:\d\d)) ?")


class PodLog:
    """Removes timestamps, and lines that have been read before."""

    def __init__(self) -> None:
        self._partial = b""
        self._last = b""  # the stamp of the last whole line
        self._until = b""

    @property
    def since(self) -> str:
        """The timestamp to go on from; empty for the beginning."""
        return self._last.decode()

    def resume(self) -> None:
        """The log is read again from `since`, the timestamp of the last line."""
        self._partial, self._until = b"", self._last

    def feed(self, data: bytes) -> bytes:
        """The new lines that `data` completes."""
        *lines, self._partial = (self._partial + data).split(b"\n")
        new = []
        for line in lines:
            stamp, text = _cut(line)
            if self._before(stamp):
                continue
            self._until = b""
            self._last = stamp or self._last
            new.append(text + b"\n")
        return b"".join(new)

    def finish(self) -> bytes:
        """The last line, if it has no newline."""
        stamp, text = _cut(self._partial)
        self._partial = b""
        return b"" if self._before(stamp) else text

    def _before(self, stamp: bytes) -> bool:
        return bool(stamp and self._until) and _order(stamp) <= _order(self._until)


def _cut(line: bytes) -> tuple[bytes, bytes]:
    match = _STAMP.match(line)
    return (b"", line) if match is None else (match[1], line[match.end() :])


def _order(stamp: bytes) -> tuple[bytes, bytes]:
    """A key that orders the timestamps of a pod, which may lack trailing zeros."""
    match = _STAMP.match(stamp)
    return (b"", b"") if match is None else (match[2], match[3].ljust(9, b"0"))
