"""What one process notes for the job's trace: records in a ring, and the chunks that carry them away.

Any thread may note something; the thread of the heartbeat takes the records out. A record costs less than a
microsecond. When records come faster than they are taken out, the oldest are lost, and the gap in their numbers says
how many.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvstore.job.valid_values import RoundWindow
from kvstore.spec import Key
from kvstore.tracing.offsets import ClockOffsets
from kvstore.wire import Node, TraceChunk
from kvstore.wire.tracing import (
    ANSWERED,
    ASKED,
    HANDLED,
    MARK,
    MOST_ANSWERS,
    MOST_THREADS,
    SENT_CHUNK,
    SPAN,
    packed,
)

IN_CHUNK = 512  # records; so many fit into a chunk nearly always
RING = 1 << 15  # records of one process that wait to be taken out
_ident = threading.get_ident
NOBODY = ("", -1, 0)  # who has asked for what is done without a request


class Tracer:
    """The notes of one process.

    Args:
        window: the rounds that are of interest.
        clock: seconds, monotonic.
        most: records that wait at most.

    Attributes:
        clock, window: see above.
        open: whether what happens now is of interest. Before the first round it is if that round is.
        round: the latest round of this process; 0 before the first.
        offsets: of the clock.
        wake: called when many records wait.
    """

    def __init__(self, window: RoundWindow, clock: Callable[[], float], most: int = RING) -> None:
        self.window = window
        self.clock = clock
        self.round = 0
        self.open = window.first <= 1 <= window.last
        self.offsets = ClockOffsets()
        self.wake: Callable[[], None] = _nothing
        self._wake_at = max(1, most // 4)
        self._ring: deque[tuple[Any, ...]] = deque(maxlen=most)
        self._append = self._ring.append
        self._number = itertools.count(1)
        # Requests that have been noted, and their answers have not. An aggregator's have two series of numbers.
        self._under_way: dict[tuple[int, bytes], str] = {}
        self._known_threads: dict[int, str] = {}
        self._told = False
        self._unsettled = False  # chunks have left before clocks had been compared

    @property
    def over(self) -> bool:
        """Whether the last round of interest is over."""
        return self.round > self.window.last

    def turn_to(self, window: RoundWindow) -> None:
        """Note these rounds from now on. If the first is another, it is another trace: what waits is of the one before.

        Call it in the thread that takes the records out.
        """
        if window.first != self.window.first:
            self._ring.clear()
        self.window = window
        self.open = window.first <= max(1, self.round) <= window.last
        self._told = False

    def reached(self, number: int) -> None:
        """Note that this process is in round ``number``, at least."""
        if number > self.round:
            self.round = number
            self.open = self.window.first <= number <= self.window.last

    def has(self, number: int) -> bool:
        """Return whether round ``number`` is of interest."""
        return self.window.first <= number <= self.window.last

    # ---- what is noted; callers look at ``open`` first

    def span(
        self, name: str, start: float, keys: Sequence[Key] = (), nbytes: int = 0, round_: int | None = None
    ) -> None:
        """Note that this thread has done something from ``start`` until now; nothing if that is 0.

        What began before there was this tracer has no start: nobody looked at the clock.
        """
        if not start:
            return
        end, about = self.clock(), self.round if round_ is None else round_
        key = keys[0] if keys else None
        self._append((self._next(), SPAN, start, end, _ident(), name, key, len(keys), nbytes, about))

    @contextmanager
    def during(self, name: str, keys: Sequence[Key] = (), round_: int | None = None) -> Iterator[None]:
        """Note how long the block takes, if that is of interest: of ``round_``, or of what happens when it ends."""
        start = self.clock()
        try:
            yield
        finally:
            if self.open if round_ is None else self.has(round_):
                self.span(name, start, keys, round_=round_)

    def asked(self, seq: int, peer: bytes, name: str, keys: Sequence[Key], nbytes: int) -> None:
        """Note that request ``seq`` leaves for ``peer``."""
        name_of_peer = self._under_way[seq, peer] = peer.decode()
        key, now = keys[0] if keys else None, self.clock()
        self._append((self._next(), ASKED, now, seq, name, key, len(keys), nbytes, self.round, _ident(), name_of_peer))

    def answered(self, seq: int, peer: bytes) -> None:
        """Note that request ``seq`` to ``peer`` has been answered, if it was noted."""
        name = self._under_way.pop((seq, peer), None)
        if name is not None:
            self._append((self._next(), ANSWERED, self.clock(), seq, _ident(), name))

    def handled(
        self,
        start: float,
        left: float,
        name: str,
        node: Sequence[Any],
        seq: int,
        nbytes: int,
        round_: int,
        answered: Sequence[tuple[Sequence[Any], int]],
    ) -> None:
        """Note that this process has handled a request from ``start`` until now.

        Args:
            left: when the replies left, at the earliest.
            node, seq: who has asked, and the number of the request; ``NOBODY`` and 0 for none.
            round_: the round that it is about.
            answered: of each reply that was sent, who had asked, and the number of the request.
        """
        replies = answered[:MOST_ANSWERS]
        end = self.clock()
        self._append((self._next(), HANDLED, start, left, end, _ident(), name, node, seq, nbytes, round_, replies))

    def mark(self, text: str, at: float | None = None) -> None:
        """Note that something has happened now, or ``at`` another time."""
        self._append((self._next(), MARK, self.clock() if at is None else at, text[:512]))

    def _next(self) -> int:
        """Return the number of the next record; in a flood of them, have some taken out."""
        number = next(self._number)
        if not number % self._wake_at:
            self.wake()
        return number

    # ---- for the thread of the heartbeat

    def chunks(self, node: Node) -> list[TraceChunk]:
        """Take out what has been noted, as the chunks that carry it; without news, nothing.

        News are, too, that the rounds are over, and how far the clocks are apart, if earlier chunks did not say that.
        """
        made: list[TraceChunk] = []
        over, settled = self.over, self.offsets.settled
        while records := self._taken():
            made.extend(self._chunk(node, over, part) for part in _parts(records))
        if not made and ((over and not self._told) or (settled and self._unsettled)):
            made.append(self._chunk(node, over, packed([])))
        self._told = over
        self._unsettled = not settled and (self._unsettled or bool(made))
        return made

    def _chunk(self, node: Node, over: bool, frame: bytes) -> TraceChunk:
        return TraceChunk(node, self.offsets.known, self._threads(), over, [frame])

    def _taken(self) -> list[tuple[Any, ...]]:
        records: list[tuple[Any, ...]] = []
        while len(records) < IN_CHUNK:
            try:
                records.append(self._ring.popleft())
            except IndexError:
                break
        return records

    def _threads(self) -> list[list[Any]]:
        """Return the numbers and names of threads that there are or have been."""
        for thread in threading.enumerate():
            if thread.ident is not None:
                self._known_threads[thread.ident] = thread.name[:128]
        while len(self._known_threads) > MOST_THREADS:
            del self._known_threads[next(iter(self._known_threads))]
        return [[ident, name] for ident, name in self._known_threads.items()]


def _parts(records: list[tuple[Any, ...]]) -> list[bytes]:
    """Return the frames of ``records``, none of which is too long."""
    frame = packed(records)
    if len(frame) <= SENT_CHUNK or len(records) == 1:
        return [frame]
    half = len(records) // 2
    return _parts(records[:half]) + _parts(records[half:])


def _nothing() -> None:
    """Wake nobody."""
