"""Messages in a stream of bytes. Pure.

The stream begins with a greeting. Each message is the number of its frames (32 bits), the length of each frame (64 bits
each), and the frames. Numbers are little-endian.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Sequence

from kvstore import wire
from kvstore.errors import WireError
from kvstore.transport.memory import SMALL, ScatteredFrame, space
from kvstore.transport.transport import MAX_FRAME, Frames

MAX_FRAMES = 1 << 17  # in a message: a header of 1 MiB is the most that a peer can make us buffer before any frame
_ROOM = 64 << 10  # bytes; a frame that is smaller than SMALL must fit
_FIRST_ROOM = 256  # bytes, until the greeting
SHORT_FRAMES, SHORT_BYTES = 4, 16 << 10  # of a stranger's message: it may hold an address, or an error's text
_ENOUGH = 256 << 10  # bytes of a large frame that are worth waking up for; for fewer, waking costs more than copying

GREETING = b"kvstore\x01"  # the last byte is the number of this format
_COUNT = struct.Struct("<I")
_LENGTH = 8


def _header(count: int) -> struct.Struct:
    return struct.Struct(f"<I{count}Q")


_HEADERS = [_header(count) for count in range(8)]  # of usual messages


def packed(frames: Sequence[wire.Buffer | ScatteredFrame]) -> list[wire.Buffer]:
    """Return the bytes of a message in parts, none of them empty. Frames are not copied."""
    parts: list[wire.Buffer] = [b""]
    lengths: list[int] = []
    for frame in frames:
        if isinstance(frame, ScatteredFrame):
            lengths.append(sum(map(len, frame)))
            parts.extend(frame)
            continue
        length = len(frame)
        if isinstance(frame, memoryview) and length != frame.nbytes:
            frame = frame.cast("B")
            length = len(frame)
        lengths.append(length)
        if length:
            parts.append(frame)
    count = len(lengths)
    header = _HEADERS[count] if count < len(_HEADERS) else _header(count)
    parts[0] = header.pack(count, *lengths)
    return parts


def is_greeting(start: wire.Buffer) -> bool:
    """Whether the first bytes of a stream are the whole greeting; raise ``WireError`` if they differ from it."""
    if not GREETING.startswith(start):
        raise WireError(f"a stream must begin with the greeting {GREETING!r}, not {bytes(start)!r}")
    return len(start) == len(GREETING)


class Introduction:
    """Takes the greeting, and then short messages, out of a stranger's stream.

    It asks for no byte more than the next part needs. So a silent stranger costs next to no memory, and what follows a
    message stays in the system's buffer until the stranger turns out to be a member. Then ``Incoming`` goes on.
    """

    def __init__(self) -> None:
        self.greeted = False
        self._lengths: Sequence[int] = ()
        self._await(len(GREETING), self._greet)

    def room(self) -> memoryview:
        """Return the buffer for the next bytes of the stream; at least one byte, filled from its start."""
        return memoryview(self._part)[self._filled :]

    def take(self, count: int) -> Frames | None:
        """Take so many bytes that have been put there; return the message if it is whole now."""
        self._filled += count
        return self._step(self._part) if self._filled == len(self._part) else None

    def _await(self, size: int, step: Callable[[bytearray], Frames | None]) -> None:
        self._part, self._filled, self._step = bytearray(size), 0, step

    def _greet(self, part: bytearray) -> None:
        self.greeted = is_greeting(part)
        self._await(_COUNT.size, self._begin)

    def _begin(self, part: bytearray) -> None:
        (count,) = _COUNT.unpack(part)
        if not 0 < count <= SHORT_FRAMES:
            raise WireError(f"a message of {count} frames from a stranger; valid: 1 to {SHORT_FRAMES}")
        self._await(_LENGTH * count, self._announce)

    def _announce(self, part: bytearray) -> Frames | None:
        self._lengths = struct.unpack(f"<{len(part) // _LENGTH}Q", part)
        size = sum(self._lengths)
        if size > SHORT_BYTES:
            raise WireError(f"a message of {size} bytes from a stranger; valid: at most {SHORT_BYTES}")
        self._await(size, self._end)
        return None if size else self._end(self._part)

    def _end(self, part: bytearray) -> Frames:
        stops = itertools.accumulate(self._lengths)
        self._await(_COUNT.size, self._begin)
        return [part[stop - length : stop] for stop, length in zip(stops, self._lengths, strict=True)]


class Incoming:
    """Takes messages out of a stream. Large frames are received where they stay."""

    def __init__(self, greeted: bool = False) -> None:
        self.greeted = greeted
        self._bytes = bytearray(_ROOM if greeted else _FIRST_ROOM)
        self._start = self._stop = 0  # of what is in there and not taken yet
        self._lengths: list[int] = []  # of the message that is coming, last first
        self._frames: Frames = []
        self._large: memoryview | None = None  # the frame that is coming, with as much of it as has come
        self._filled = 0

    def room(self) -> memoryview:
        """Return the buffer for the next bytes of the stream; at least one byte, filled from its start."""
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
        """How many bytes are worth waking up for: 1, but within a large frame the rest of it, up to a limit."""
        return 1 if self._large is None else min(len(self._large) - self._filled, _ENOUGH)

    def take(self, count: int) -> list[Frames]:
        """Take so many bytes that have been put there; return the messages that are whole now."""
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
        if not self._lengths and not self._frames:
            while (frames := self._whole()) is not None:
                messages.append(frames)
            if self._start == self._stop:
                return messages
        while self._go_on():
            messages.append(self._frames)
            self._frames = []
        return messages

    def _greet(self) -> bool:
        buffered = self._stop - self._start
        if not is_greeting(self._bytes[self._start : self._start + min(buffered, len(GREETING))]):
            return False
        self._bytes = self._bytes[self._start + len(GREETING) : self._stop] + bytearray(_ROOM)
        self._start, self._stop = 0, buffered - len(GREETING)
        self.greeted = True
        return True

    def _whole(self) -> Frames | None:
        """Take the next message if it is here, all of it and right, as most are; else return None and take nothing."""
        start, stop = self._start, self._stop
        if stop - start < _COUNT.size:
            return None
        (count,) = _COUNT.unpack_from(self._bytes, start)
        if not 0 < count < len(_HEADERS) or stop - start < _HEADERS[count].size:
            return None
        _, *lengths = _HEADERS[count].unpack_from(self._bytes, start)
        start += _HEADERS[count].size
        if sum(lengths) > stop - start:
            return None
        frames: Frames = []
        for length in lengths:
            frames.append(self._bytes[start : start + length])
            start += length
        self._start = start
        return frames

    def _go_on(self) -> bool:
        """Take what has come of a message: its header, and its frames; return whether it is whole."""
        lengths = self._lengths
        if not lengths and not self._frames:
            if not self._begin():
                return False
            lengths = self._lengths
        while lengths:
            length, buffered = lengths[-1], self._stop - self._start
            if length <= buffered:
                self._frames.append(self._bytes[self._start : self._start + length])
                self._start += length
                lengths.pop()
                continue
            if length >= SMALL:
                self._large = space(length)
                self._large[:buffered] = self._bytes[self._start : self._stop]
                self._filled, self._start = buffered, self._stop
                lengths.pop()
            return False
        return True

    def _begin(self) -> bool:
        buffered = self._stop - self._start
        if buffered < _COUNT.size:
            return False
        (count,) = _COUNT.unpack_from(self._bytes, self._start)
        if not 0 < count <= MAX_FRAMES:
            raise WireError(f"a message of {count} frames")
        size = _COUNT.size + _LENGTH * count
        if buffered < size:
            if size > len(self._bytes) // 2:
                self._bytes = self._bytes[self._start : self._stop] + bytearray(2 * size)
                self._start, self._stop = 0, buffered
            return False
        self._lengths = list(struct.unpack_from(f"<{count}Q", self._bytes, self._start + _COUNT.size))[::-1]
        if max(self._lengths) > MAX_FRAME:
            raise WireError(f"a frame of {max(self._lengths)} bytes")
        self._start += size
        return True
