"""Messages as a stream of bytes, for links over pipes. No I/O.

A stream begins with MAGIC. What a login shell prints before it, such as a banner, is not a message. A message is the
number of its frames, their lengths, and the frames.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from kvstore import wire
from kvstore.errors import WireError

MAGIC = b"\0kvstore agent 1\n"
MAX_PREAMBLE = 1 << 16
MAX_FRAMES = 4
MAX_MESSAGE = 64 << 20
_COUNT = struct.Struct("!I")


def frame(frames: Sequence[wire.Buffer]) -> bytes:
    """The bytes of one message."""
    lengths = struct.pack(f"!{len(frames) + 1}I", len(frames), *(len(part) for part in frames))
    return b"".join([lengths, *frames])


class Unframer:
    """Takes bytes, and returns messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._begun = False

    @property
    def preamble(self) -> str:
        """What came before MAGIC, if that has not come."""
        return "" if self._begun else self._buffer.decode(errors="replace").strip()

    def feed(self, data: bytes) -> list[list[bytes]]:
        """The messages that `data` completes, each as its frames.

        Raises:
            WireError: the bytes are not messages.
        """
        self._buffer += data
        if not self._begun and not self._begin():
            return []
        messages = []
        while (message := self._next()) is not None:
            messages.append(message)
        return messages

    def _begin(self) -> bool:
        start = self._buffer.find(MAGIC)
        if start < 0:
            if len(self._buffer) > MAX_PREAMBLE:
                raise WireError("expected an agent, got a flood of other output")
            return False
        del self._buffer[: start + len(MAGIC)]
        self._begun = True
        return True

    def _next(self) -> list[bytes] | None:
        if len(self._buffer) < 4:
            return None
        (count,) = _COUNT.unpack_from(self._buffer)
        if not 1 <= count <= MAX_FRAMES:
            raise WireError(f"a message has {count} frames; valid: 1 to {MAX_FRAMES}")
        head = 4 * (count + 1)
        if len(self._buffer) < head:
            return None
        lengths = struct.unpack_from(f"!{count}I", self._buffer, 4)
        if sum(lengths) > MAX_MESSAGE:
            raise WireError(f"a message has {sum(lengths)} bytes; at most {MAX_MESSAGE} are allowed")
        if len(self._buffer) < head + sum(lengths):
            return None
        frames, at = [], head
        for length in lengths:
            frames.append(bytes(self._buffer[at : at + length]))
            at += length
        del self._buffer[:at]
        return frames
