"""What a core spends on messages, without links: to decode each, to decide, and to encode what follows."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvstore import wire
from servers.requests.replies import Outbox

Said = tuple[bytes, wire.Message]  # a link, and what comes over it


@dataclass
class Step:
    """What one role spent on one step of the job.

    Attributes:
        role, name: whose, and which.
        decoding, deciding, encoding: microseconds, for each message.
        sent: messages that followed.
        received_bytes, sent_bytes: of the headers of both.
    """

    role: str
    name: str
    decoding: list[float] = field(default_factory=list)
    deciding: list[float] = field(default_factory=list)
    encoding: list[float] = field(default_factory=list)
    sent: int = 0
    received_bytes: int = 0
    sent_bytes: int = 0

    @property
    def each(self) -> list[float]:
        """Microseconds of each message: to decode it, to decide, and to encode what follows."""
        return list(map(sum, zip(self.decoding, self.deciding, self.encoding, strict=True)))

    @property
    def decisions_s(self) -> float:
        """Seconds of the core alone, for all messages."""
        return sum(self.deciding) / 1e6

    @property
    def all_s(self) -> float:
        """Seconds for all messages."""
        return sum(self.each) / 1e6

    @property
    def words(self) -> str:
        """What there is to say beside the median."""
        return (
            f"{len(self.deciding):,} messages in, {self.sent:,} out; the longest {max(self.each) / 1e3:.1f} ms; "
            f"{self.all_s:.3f} s, of which decisions {self.decisions_s:.3f} s"
        )


class Core:
    """Measures what a core does with messages.

    Args:
        role: whose it is.
        handle: the core.
    """

    def __init__(self, role: str, handle: Callable[[bytes, wire.Message], Outbox]) -> None:
        self.role = role
        self._handle = handle
        self.last: Outbox = []

    def take(self, name: str, messages: Iterable[Said]) -> Step:
        """Let the core handle messages as if they had come over links."""
        step = Step(self.role, name)
        for peer, message in messages:
            frames = list(map(bytearray, wire.encode(message)))
            began = time.thread_time()
            received = wire.decode(frames)
            decoded = time.thread_time()
            self.last = self._handle(peer, received)
            decided = time.thread_time()
            step.sent_bytes += _encoded(self.last)
            encoded = time.thread_time()
            step.decoding.append(1e6 * (decoded - began))
            step.deciding.append(1e6 * (decided - decoded))
            step.encoding.append(1e6 * (encoded - decided))
            step.sent += len(self.last)
            step.received_bytes += len(frames[0])
        return step


def _encoded(outbox: Outbox) -> int:
    """Encode what is sent, as ``Service`` does; return the bytes of the headers."""
    before: wire.Message | None = None
    header = total = 0
    for _, message in outbox:
        if message is not before:
            header, before = len(wire.encode(message)[0]), message
        total += header
    return total


def median_us(steps: Iterable[Step]) -> float:
    """Return the median over all messages of some steps."""
    return statistics.median([each for step in steps for each in step.each])
