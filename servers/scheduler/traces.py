"""What members have noted for the job's trace, on its way to the observer that makes a file of it. Pure.

Chunks are kept until the observer has fetched them, and asks for what comes after. Beyond a limit the oldest are
forgotten, and counted: a trace must not fill the scheduler's memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from kvstore import wire
from kvstore.errors import UsageError
from kvstore.wire.tracing import MOST_CHUNKS

MOST_BYTES = 32 << 20  # of chunks that wait
ANSWER_BYTES = 8 << 20  # in one answer, but at least one chunk
ATTENTIVE_S = 5.0  # an observer that has not asked for so long does not come again
FIRST_S = 10.0  # how long an observer may take to ask for the first time
_NUMBERS = 1 << 40  # chunks of one start of the scheduler, so that the chunks of the next start have other numbers


class _KeptChunk(NamedTuple):
    number: int
    frames: Sequence[wire.Buffer]
    nbytes: int


class Traces:
    """The chunks of one job that wait for the observer, ``most`` bytes of them.

    ``open`` says whether workers are in rounds that are of interest; None as long as none has said.
    """

    def __init__(self, now: float, start: int = 1, most: int = MOST_BYTES) -> None:
        self.open: bool | None = None
        self._most = most
        self._next = (start - 1) * _NUMBERS + 1
        self._kept: deque[_KeptChunk] = deque()
        self._nbytes = 0
        self._dropped = 0
        self._patient_until = now + FIRST_S
        self._reader: int | None = None  # the observer that fetches

    def take(self, chunk: wire.TraceChunk) -> None:
        if chunk.node.role == "worker":
            self.open = not chunk.over
        frames = wire.encode(chunk.whole)  # which is not a transport's memory
        kept = _KeptChunk(self._next, frames, sum(map(len, frames)))
        self._next += 1
        self._kept.append(kept)
        self._nbytes += kept.nbytes
        while self._nbytes > self._most and len(self._kept) > 1:
            self._nbytes -= self._kept.popleft().nbytes
            self._dropped += 1

    def begin(self) -> None:
        """Forget the chunks of another trace."""
        self._kept.clear()
        self._nbytes = 0
        self._dropped = 0
        self.open = None

    def admit(self, message: wire.FetchTrace, now: float) -> None:
        """Take an observer for the one that fetches.

        Raises:
            UsageError: another one does: half a trace in each of two files would help nobody.
        """
        reader = message.node.incarnation
        if self._reader not in (None, reader) and now < self._patient_until:
            raise UsageError(
                "this job's trace is being written already, by launch.py --trace or another kvstore-status --trace; "
                "ask again when its rounds are over"
            )
        self._reader = reader

    def release(self, reader: int) -> None:
        """Let another observer fetch: this one has left. It may be the same process, over another link."""
        if self._reader == reader:
            self._reader = None

    def fetch(self, message: wire.FetchTrace, now: float) -> wire.TraceFetched:
        self._patient_until = now + ATTENTIVE_S
        while self._kept and self._kept[0].number <= message.after:
            self._nbytes -= self._kept.popleft().nbytes
        chosen: list[_KeptChunk] = []
        nbytes = 0
        for kept in self._kept:
            if chosen and (nbytes + kept.nbytes > ANSWER_BYTES or len(chosen) == MOST_CHUNKS):
                break
            chosen.append(kept)
            nbytes += kept.nbytes
        frames = [frame for kept in chosen for frame in kept.frames]
        first = chosen[0].number if chosen else self._next
        return wire.TraceFetched(message.seq, first, self._dropped, len(chosen) < len(self._kept), frames)

    def awaited(self, now: float) -> bool:
        """Return whether an observer is still to fetch something, and has asked lately."""
        return bool(self._kept) and now < self._patient_until
