"""A file of lines that grows at its end, and is continued after whatever has ended its writer."""

from __future__ import annotations

import os
from pathlib import Path

from kvstore import UsageError

_BLOCK = 1 << 16


class LineFile:
    """A file to which whole lines are appended. A kill loses at most the line that is being written.

    Each line is one ``write``. If a file ends within a line, because the machine failed or the disk was full, that part
    is cut off first.

    Args:
        path: the file. It is created with its folders if missing, and continued otherwise.
        start: what the file begins with, unless it is empty.

    Raises:
        UsageError: the file begins with something else, so it is not one of ours.
        OSError: the file cannot be opened or written to.
    """

    def __init__(self, path: Path, start: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            begins = os.pread(self._fd, len(start), 0)
            if not start.startswith(begins):
                raise UsageError(f"{path} has other content, which begins with {begins!r}; choose another name")
            self._size = _whole_lines(self._fd)
            os.ftruncate(self._fd, self._size)
        except BaseException:
            os.close(self._fd)
            raise

    def append(self, line: str) -> None:
        """Write a line, or nothing of it.

        Args:
            line: the line, with its end.

        Raises:
            OSError: it could not be written.
        """
        data = line.encode()
        try:
            written = os.write(self._fd, data)
            while written < len(data):  # the disk is full, or nearly
                written += os.write(self._fd, data[written:])
        except BaseException:
            os.ftruncate(self._fd, self._size)
            raise
        self._size += len(data)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def _whole_lines(fd: int) -> int:
    """Return the size of a file without a last line that has no end."""
    end = os.fstat(fd).st_size
    while end > 0:
        begin = max(0, end - _BLOCK)
        found = os.pread(fd, end - begin, begin).rfind(b"\n")
        if found >= 0:
            return begin + found + 1
        end = begin
    return 0
