"""Messages in a stream of bytes: a greeting, then of each how many frames, the length of each, the frames. Pure.

Numbers are little-endian: one of 32 bits, then one of 64 bits for each frame.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from kvstore.errors import WireError
from kvstore.memory import SMALL, Parts, space
from kvstore.transport.base import MAX_FRAME, Frames
from kvstore.wire import Buffer

MAX_FRAMES = 1 << 17  # in a message
_ROOM = 64 << 10  # bytes; a frame that is smaller than SMALL must fit
_STRANGERS_ROOM = 256  # bytes, until the greeting: whoever says nothing must not cost much
_ENOUGH = 256 << 10  # bytes of a large frame that are worth waking up for: below, that costs more than the copy

GREETING = b"kvstore\x01"  # the last byte is the number of this format
_COUNT = struct.Struct("<I")
_LENGTH = 8


def packed(frames: Sequence[Buffer | Parts]) -> list[memoryview]:
    """Return the bytes of a message, in parts: frames where they lie."""
    parts: list[memoryview] = [memoryview(b"")]
    lengths: list[int] = []
    for frame in frames:
        if isinstance(frame, Parts):
            lengths.append(sum(map(len, frame)))
            parts.extend(frame)
            continue
        view = memoryview(frame).cast("B")
        lengths.append(len(view))
        if lengths[-1]:
            parts.append(view)
    parts[0] = memoryview(struct.pack(f"<I{len(lengths)}Q", len(lengths), *lengths))
    return parts


class Incoming:
    """Takes messages out of a stream. Large frames are received where they stay.

    Attributes:
        greeted: whether the stream has shown that it is one.
    """

    def __init__(self) -> None:
        self.greeted = False
        self._bytes = bytearray(_STRANGERS_ROOM)
        self._start = self._stop = 0  # of what is in there and not taken yet
        self._lengths: list[int] = []  # of the message that is coming, last first
        self._frames: Frames = []
        self._large: memoryview | None = None  # the frame that is coming, with as much of it as is here
        self._filled = 0

    def room(self) -> memoryview:
        """Where the next bytes of the stream are to be put: at least one, at the start of it."""
        if self._large is not None:
            return self._large[self._filled :]
        if self._start == self._stop:
            self._start = self._stop = 0
        elif len(self._bytes) - self._stop < len(self._bytes) // 2:
            count = self._stop - self._start
            self._bytes[:count] = self._bytes[self._start : self._stop]
            self._start, self._stop = 0, count
        return memoryview(self._bytes)[self._stop :]

    @property
    def enough(self) -> int:
        """How many bytes are worth waking up for: 1, but in a large frame what it lacks, or a good part of that."""
        return 1 if self._large is None else min(len(self._large) - self._filled, _ENOUGH)

    def take(self, count: int) -> list[Frames]:
        """Note that so many bytes have been put there; return the messages that are whole now.

        Raises:
            WireError: the stream is none of messages.
        """
        if self._large is not None:
            self._filled += count
            if self._filled < len(self._large):
                return []
            self._frames.append(self._large)
            self._large = None
        else:
            self._stop += count
        messages: list[Frames] = []
        if not self.greeted and not self._greet():
            return messages
        while self._go_on():
            if not self._lengths:
                messages.append(self._frames)
                self._frames = []
        return messages

    def _greet(self) -> bool:
        """Take the greeting, if it is whole."""
        here = self._stop - self._start
        said = self._bytes[self._start : self._start + min(here, len(GREETING))]
        if not GREETING.startswith(said):
            raise WireError("no greeting")
        if here < len(GREETING):
            return False
        self._bytes = self._bytes[self._start + len(GREETING) : self._stop] + bytearray(_ROOM)
        self._start, self._stop = 0, here - len(GREETING)
        self.greeted = True
        return True

    def _go_on(self) -> bool:
        """Take one frame, or one header before it; return whether there was a whole one."""
        if not self._lengths and not self._frames:
            return self._begin()
        if not self._lengths:
            return True  # the large frame that has just come was the last
        length, here = self._lengths[-1], self._stop - self._start
        if length <= here:
            self._frames.append(self._bytes[self._start : self._start + length])
            self._start += length
            self._lengths.pop()
            return True
        if length < SMALL:
            return False
        self._large = space(length)
        self._large[:here] = self._bytes[self._start : self._stop]
        self._filled, self._start = here, self._stop
        self._lengths.pop()
        return False

    def _begin(self) -> bool:
        here = self._stop - self._start
        if here < _COUNT.size:
            return False
        (count,) = _COUNT.unpack_from(self._bytes, self._start)
        if not 0 < count <= MAX_FRAMES:
            raise WireError(f"a message of {count} frames")
        size = _COUNT.size + _LENGTH * count
        if here < size:
            if size > len(self._bytes) // 2:
                self._bytes = self._bytes[self._start : self._stop] + bytearray(2 * size)
                self._start, self._stop = 0, here
            return False
        self._lengths = list(struct.unpack_from(f"<{count}Q", self._bytes, self._start + _COUNT.size))[::-1]
        if max(self._lengths) > MAX_FRAME:
            raise WireError(f"a frame of {max(self._lengths)} bytes")
        self._start += size
        return True
