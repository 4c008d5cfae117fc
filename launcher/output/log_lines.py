"""The lines of a log file, in the format of Kubernetes' container logs. No I/O.

An entry is a line: the time (UTC, to a microsecond), the stream (`stdout` or `stderr`), a tag, and what the process has
written, byte for byte. The tag is F where a newline ends the text, and P where the next entry of that stream goes on.

    2026-03-01T09:30:00.123456Z stderr F Epoch[0] Train-accuracy=0.91

Collectors of logs call the format CRI (https://kubernetes.io/docs/concepts/cluster-administration/logging/). Of a text
that is rewritten by carriage returns, as a progress bar is, the last version is kept.
"""

from __future__ import annotations

from datetime import datetime, timezone

STREAMS = {1: "stdout", 2: "stderr"}
LONGEST = 64 << 10  # bytes; of a longer line, the beginning is an entry already


def stamp(seconds: float) -> str:
    """A time since the epoch as entries have it."""
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def remark(text: str, at: str) -> bytes:
    """An entry with a line of launch.py itself, which is marked as such."""
    return said(f"launch.py: {' '.join(text.split())}", at)


def said(text: str, at: str) -> bytes:
    """Entries with the lines of a text, as if on standard error."""
    lines = text.encode(errors="surrogateescape").split(b"\n")
    return b"".join(_head("stderr", "F", at) + line + b"\n" for line in lines)


class LogLines:
    """Makes entries of what one stream of a process writes.

    Args:
        stream: the name of the stream.
    """

    def __init__(self, stream: str) -> None:
        self._stream = stream
        self._held = b""  # of a line that has not ended
        self._begun = False  # of which a part is an entry already

    @property
    def holds(self) -> bool:
        """Whether the beginning of a line waits for its end, and may be written before."""
        return bool(self._held) and b"\r" not in self._held

    def feed(self, data: bytes, at: str) -> bytes:
        """The entries that `data` completes.

        Args:
            data: what the stream has written.
            at: the time, from `stamp`.
        """
        whole, newline, rest = data.rpartition(b"\n")
        if not newline:
            return self._hold(self._held + rest, at)
        whole = self._held + whole
        if b"\r" in whole:
            first, *others = whole.split(b"\n")
            first = first if self._begun else _visible(first)
            whole = b"\n".join([first, *map(_visible, others)])
        head = _head(self._stream, "F", at)
        entries = head + whole.replace(b"\n", b"\n" + head) + b"\n"
        self._begun = False
        return entries + self._hold(rest, at)

    def flush(self, at: str) -> bytes:
        """The beginning of a line that is held, as an entry."""
        if not self._held:
            return b""
        held, self._held, self._begun = self._held, b"", True
        return _head(self._stream, "P", at) + held + b"\n"

    def finish(self, at: str) -> bytes:
        """The last line, if it has no newline. Another process may write after it."""
        entry = b"" if b"\r" in self._held and not self._held.strip() else self.flush(at)
        self._held, self._begun = b"", False
        return entry

    def _hold(self, text: bytes, at: str) -> bytes:
        self._held = _visible(text) if b"\r" in text and not self._begun else text
        return self.flush(at) if len(self._held) > LONGEST else b""


def _head(stream: str, tag: str, at: str) -> bytes:
    return f"{at} {stream} {tag} ".encode()


def _visible(line: bytes) -> bytes:
    """A line without what carriage returns have had overwritten."""
    return line[line.rstrip(b"\r").rfind(b"\r") + 1 :]
