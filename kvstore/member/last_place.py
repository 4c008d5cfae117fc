"""Where this process was at its last beat, in memory that the process beside it reads.

A call that keeps the interpreter's lock, and a stop, end all answers of this process. What it has written stays. Nobody
waits for the reader, and the reader is not woken.
"""

from __future__ import annotations

import os
import struct
import zlib

_HEADER = struct.Struct("<IH")  # of the text: a checksum, for a text may be read while it is written; its length
_LONGEST = 512  # bytes of the text


class LastPlace:
    """A text in shared memory.

    Args:
        fd: of the memory, inherited from who writes; None makes new memory.

    Attributes:
        fd: see above.

    Raises:
        OSError: the system has none.
    """

    def __init__(self, fd: int | None = None) -> None:
        self.fd = os.memfd_create("kvstore-place") if fd is None else fd
        self._written = ""

    def write(self, text: str) -> None:
        """Replace the text."""
        if text != self._written:
            data = text.encode()[:_LONGEST]
            os.pwrite(self.fd, _HEADER.pack(zlib.crc32(data), len(data)) + data, 0)
            self._written = text

    def read(self) -> str:
        """Return the text; empty if there is none, or if it is being written."""
        data = os.pread(self.fd, _HEADER.size + _LONGEST, 0)
        if len(data) < _HEADER.size:
            return ""
        checksum, length = _HEADER.unpack_from(data)
        text = data[_HEADER.size : _HEADER.size + length]
        return text.decode(errors="replace") if zlib.crc32(text) == checksum else ""

    def close(self) -> None:
        """Give this end up."""
        os.close(self.fd)
