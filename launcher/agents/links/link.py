"""The link between launch.py and an agent: what all links do, the link over pipes, and the ticket of other links.

A stream over pipes begins with MAGIC. What a login shell prints before it, such as a banner, is not a message. A
message is the number of its frames, their lengths, and the frames.
"""

from __future__ import annotations

import os
import selectors
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvstore import wire
from kvstore.errors import ConfigError, WireError
from kvstore.job import settings
from launcher.agents.links.protocol import Bye, Output, OutputAck

_READ = 1 << 16
_ACK = 1 << 18  # bytes

OnMessage = Callable[[wire.Message], None]
OnEnd = Callable[[str], None]


MAGIC = b"\0kvstore agent 1\n"
MAX_PREAMBLE = 1 << 16
MAX_FRAMES = 4
MAX_MESSAGE = 64 << 20
_COUNT = struct.Struct("!I")


def frame(frames: Sequence[wire.Buffer]) -> bytes:
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
        """The messages that `data` completes, each as its frames. Raises WireError: the bytes are not messages."""
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


class AgentLink:
    """One end of a link. It registers what it waits for with a selector; a key's data is the callable to call.

    Output that is not wanted now is taken but not acknowledged, so the agent sends no more of it. If it stayed where it
    is, exits and answers to pings would wait behind it.

    Attributes:
        pending: the number of bytes of output that the other end has not acknowledged.
    """

    def __init__(self) -> None:
        self.pending = 0
        self._closed = False
        self._reading = True
        self._owed = 0  # bytes of output that have come and are not acknowledged

    @property
    def unsent(self) -> int:
        """The number of bytes that would be lost if the link ended now."""
        return 0

    def open(self, selector: selectors.BaseSelector, on_message: OnMessage, on_end: OnEnd) -> None:
        self._selector, self._on_message, self._on_end = selector, on_message, on_end

    def send(self, message: wire.Message) -> None:
        """Send or queue a message. Do nothing if the link has ended."""
        if self._closed:
            return
        if isinstance(message, Output):
            self.pending += _size(message)
        elif isinstance(message, Bye):
            self.pending = 0  # the rest will not be acknowledged; the agent waits until it has been sent
        self._write(wire.encode(message))

    def reading(self, wanted: bool) -> None:
        self._reading = wanted
        self._acknowledge(0)

    def poll(self) -> None:
        """Take what has come and the selector may have missed."""

    def close(self) -> None:
        """End the link without calling `on_end`. May be called again."""
        self._closed = True

    def _write(self, frames: Sequence[wire.Buffer]) -> None:
        raise NotImplementedError

    def take(self, frames: Sequence[wire.Buffer]) -> None:
        if self._closed:
            return
        try:
            message = wire.decode(frames)
        except WireError as error:
            self._end(str(error))
            return
        if isinstance(message, OutputAck):
            self.pending = max(0, self.pending - message.count)
            return
        self._on_message(message)
        if isinstance(message, Output):
            self._acknowledge(_size(message))

    def _acknowledge(self, count: int) -> None:
        self._owed += count
        if self._reading and self._owed >= _ACK:
            owed, self._owed = self._owed, 0
            self.send(OutputAck(owed))

    def _end(self, how: str) -> None:
        if not self._closed:
            self.close()
            self._on_end(how)


class PipeLink(AgentLink):
    """A link over two pipes, which it closes. `greet`: whether to send MAGIC first, as agents do."""

    def __init__(self, source: int, target: int, *, greet: bool = False) -> None:
        super().__init__()
        self._source, self._target = source, target
        os.set_blocking(source, False)
        os.set_blocking(target, False)
        self._unframer = Unframer()
        if greet:
            self._unframer.feed(MAGIC)  # nobody greets an agent
        self._out = bytearray(MAGIC if greet else b"")
        self._opened = self._writing = False

    @property
    def unsent(self) -> int:
        return 0 if self._closed else len(self._out)

    @property
    def preamble(self) -> str:
        """What the other end has said instead of a message, if it has sent none."""
        return self._unframer.preamble

    def open(self, selector: selectors.BaseSelector, on_message: OnMessage, on_end: OnEnd) -> None:
        super().open(selector, on_message, on_end)
        self._opened = True
        selector.register(self._source, selectors.EVENT_READ, self._read)
        self._flush()

    def close(self) -> None:
        if self._closed:
            return
        self._want_write(False)
        if self._opened:
            self._selector.unregister(self._source)
        self._closed = True
        os.close(self._source)
        os.close(self._target)

    def _write(self, frames: Sequence[wire.Buffer]) -> None:
        self._out += frame(frames)
        self._flush()

    def _read(self) -> None:
        if self._closed:  # by what came just before, and the selector had us on its list
            return
        try:
            data = os.read(self._source, _READ)
            for frames in self._unframer.feed(data):
                self.take(frames)
        except BlockingIOError:
            return
        except OSError as error:
            self._end(error.strerror or "it broke")
        except WireError as error:
            self._end(str(error))
        else:
            if not data:
                self._end("it was closed")

    def _flush(self) -> None:
        if self._closed:
            return
        while self._out:
            try:
                written = os.write(self._target, self._out[:_READ])
            except BlockingIOError:
                break
            except OSError as error:
                self._out.clear()
                # What has come before is read first, and then the end.
                if not isinstance(error, BrokenPipeError):
                    self._end(error.strerror or "it broke")
                return
            del self._out[:written]
        self._want_write(bool(self._out))

    def _want_write(self, wanted: bool) -> None:
        if wanted == self._writing or not self._opened:
            return
        self._writing = wanted
        if wanted:
            self._selector.register(self._target, selectors.EVENT_WRITE, self._flush)
        else:
            self._selector.unregister(self._target)


def _size(message: Output) -> int:
    return sum(map(len, message.buffers))


ENLIST = settings.ENLIST.name


@dataclass(frozen=True)
class AgentTicket:
    """What an agent needs to connect to launch.py. It is a secret: a process that has it can be an agent of the job."""

    endpoint: str  # the endpoint where launch.py listens: `tcp://address:port`
    server_key: str  # launch.py's public key
    public: str
    secret: str = field(repr=False)

    @property
    def text(self) -> str:
        """The ticket as the value of an environment variable."""
        return " ".join((self.endpoint, self.server_key, self.public, self.secret))

    @classmethod
    def parse(cls, text: str) -> AgentTicket:
        """Read a ticket. Raises ConfigError: the text is not a ticket. The message does not show it."""
        words = text.split()
        if len(words) != 4 or not words[0].startswith("tcp://") or any(len(key) != 40 for key in words[1:]):
            raise ConfigError(f"{ENLIST} is not a ticket; only launch.py sets it, for its agents")
        return cls(*words)
