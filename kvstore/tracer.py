"""What one process notes for the job's trace: events, the rows of bytes that they become, and chunks of these.

Any thread may note something. A thread that does so only appends an event, because the job waits for it. Each time that
64 events wait, it makes rows of all of them. Together they take a fraction of the time that they would take one by one,
because the processor's caches have the code then. The thread of the heartbeat takes the rows out, and they leave as
they are: while it encoded something, the program's thread would wait for the interpreter. When rows come faster than
they are taken out, the newest are lost, and the gap in their numbers says how many.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvstore import wire
from kvstore.job.valid_values import RoundWindow
from kvstore.spec import Key
from kvstore.wire.tracing import (
    ANSWERED,
    ASKED,
    HANDLED,
    MARK,
    MOST_ANSWERS,
    MOST_RECORDS,
    MOST_THREADS,
    REPLIES,
    REQUEST,
    ROW,
    SPAN,
    Label,
    packed,
)

# The oldest are dropped: their peer is lost, or does not answer that kind.
MOST_UNDER_WAY = 1 << 14  # requests without an answer that are remembered: some never have one
BATCH = 64  # events that become rows together
_ident = threading.get_ident
_row = ROW.pack
NOBODY = ("", -1, 0)  # the requester of what is done without a request

KEPT = 8  # round trips that are remembered of one start of the scheduler
MOST_STARTS = 16


class ClockOffsets:
    """By how much one process's clock and the scheduler's differ, from beats and their echoes.

    A beat is sent at one time of this process and its echo received at another; in between the scheduler has read its
    own clock. Taking the middle is wrong by at most half the round trip, however long each way took (as in NTP, RFC
    5905). Of the last round trips the shortest says it best. A scheduler that was started again may have another clock,
    so each start has an offset of its own.
    """

    def __init__(self) -> None:
        self._trips: dict[int, deque[tuple[float, float]]] = {}  # by start: half a round trip, and the offset

    @property
    def settled(self) -> bool:
        """Whether the scheduler that was heard last has echoed so often that more echoes will say little more."""
        return bool(self._trips) and len(next(reversed(self._trips.values()))) >= KEPT

    def take(self, start: int, sent: float, received: float, now: float) -> None:
        """Take an echo.

        Args:
            sent, received: when the beat left and the echo came, by this process's clock.
            now: when the scheduler answered, by its own.
        """
        if received < sent:
            return
        trips = self._trips.get(start)
        if trips is None:
            trips = self._trips[start] = deque(maxlen=KEPT)
            while len(self._trips) > MOST_STARTS:
                del self._trips[next(iter(self._trips))]
        trips.append(((received - sent) / 2, now - (sent + received) / 2))

    @property
    def known(self) -> list[list[float]]:
        """For each start: its number, the offset in seconds, and by how much that may be wrong; see ``TraceChunk``."""
        best = ((start, min(trips)) for start, trips in self._trips.items())
        return [[start, offset, error] for start, (error, offset) in best]


class Words(dict[Any, int]):
    """The number of each value that has been asked for since the last call of ``take``; no number is used twice."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def __missing__(self, value: Any) -> int:
        number = self[value] = next(self._numbers)
        return number

    def take(self) -> list[tuple[int, Any]]:
        """Return the numbers, and what they stand for, and forget them."""
        taken = [(number, value) for value, number in self.items()]
        self.clear()
        return taken


class Tracer:
    """The notes of one process.

    Attributes:
        open: whether what happens now is of interest. Before the first round it is if that round is.
        round: the latest round of this process; 0 before the first.
        wake: called when many rows wait.
    """

    def __init__(self, window: RoundWindow, clock: Callable[[], float], most: int = MOST_RECORDS) -> None:
        self.window = window
        self.clock = clock
        self.round = 0
        self.open = window.first <= 1 <= window.last
        self.offsets = ClockOffsets()
        self.wake: Callable[[], None] = _nothing
        self._most = most * ROW.size
        self._room = max(1, most * 3 // 4) * ROW.size  # with more, they are to be taken out
        self._events: deque[tuple[Any, ...]] = deque()  # a kind, and the arguments of the method that makes rows of it
        self._writing = threading.RLock()  # for all that follows; a signal's handler may note something, too
        self._rows = bytearray()
        self._crowd = False  # whether the heartbeat has been woken since
        self._lost = 0  # rows since the last chunk
        self._first = 1  # the number of the next chunk's first row
        self._labels = Words()
        self._nodes = Words()
        # Requests that have been noted, and their answers have not: when asked, by which thread, label, bytes, round,
        # and whether a chunk tells of it. An aggregator's have two series of numbers.
        self._under_way: dict[tuple[int, bytes], list[Any]] = {}
        self._known_threads: dict[int, str] = {}
        self._told = False
        self._unsettled = False  # chunks have left before clocks had been compared

    @property
    def over(self) -> bool:
        return self.round > self.window.last

    def turn_to(self, window: RoundWindow) -> None:
        """Note these rounds from now on. If the first is another, it is another trace: what waits is of the one before.

        Call it in the thread that takes the records out.
        """
        if window.first != self.window.first:
            with self._writing:
                self._events.clear()
                self._rows.clear()
                self._under_way.clear()
        self.window = window
        self.open = window.first <= max(1, self.round) <= window.last
        self._told = False

    def reached(self, number: int) -> bool:
        """Note that this process is in round ``number``, at least. Return whether that round is of interest."""
        wanted = self.window.first <= number <= self.window.last
        if number > self.round:
            self.round, self.open = number, wanted
        return wanted

    def has(self, number: int) -> bool:
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
        about = self.round if round_ is None else round_
        self._append((SPAN, name, keys, _ident(), start, self.clock(), nbytes, about))

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
        self._append((ASKED, seq, peer, name, keys, self.clock(), _ident(), nbytes, self.round))

    def answered(self, seq: int, peer: bytes) -> None:
        """Note that request ``seq`` to ``peer`` has been answered, if it was noted."""
        if self.open or self._under_way or self._events:
            self._append((ANSWERED, seq, peer, self.clock(), _ident()))

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
            answered: of each reply that was sent, who had asked, and the number of the request.
        """
        self._append((HANDLED, start, left, self.clock(), _ident(), name, node, seq, nbytes, round_, answered))

    def mark(self, text: str, at: float | None = None) -> None:
        """Note that something has happened now, or ``at`` another time."""
        self._append((MARK, text[:512], self.clock() if at is None else at))

    def _append(self, event: tuple[Any, ...]) -> None:
        events = self._events
        # Without the lock: appending to a deque is one step, and the job waits for this thread. A signal's handler may
        # note something while its thread has the lock, so that can be taken again.
        events.append(event)
        if len(events) >= BATCH:
            with self._writing:
                crowded = self._write()
            if crowded:
                self.wake()

    # ---- events become rows; the caller has the lock

    def _write(self) -> bool:
        """Make rows of the events that wait. Return whether there are many, and the heartbeat has not been woken yet.

        Rows beyond the limit are lost.
        """
        events, rows = self._events, self._rows
        while events:
            kind, *about = events.popleft()
            if kind == SPAN:
                rows += self._span(*about)
            elif kind == ASKED:
                self._ask(*about)
            elif kind == ANSWERED:
                rows += self._answer(*about)
            elif kind == HANDLED:
                rows += self._handle(*about)
            else:
                rows += self._mark(*about)
        excess = len(rows) - self._most
        if excess > 0:
            del rows[self._most :]
            self._lost += excess // ROW.size
        crowded = len(rows) > self._room and not self._crowd
        self._crowd |= crowded
        return crowded

    def _span(
        self, name: str, keys: Sequence[Key], thread: int, start: float, end: float, nbytes: int, round_: int
    ) -> bytes:
        label = self._labels[name, keys[0] if keys else None, len(keys)]
        return _row(SPAN, label, 0, thread, 0, start, end, 0.0, nbytes, round_, 0)

    def _ask(
        self, seq: int, peer: bytes, name: str, keys: Sequence[Key], at: float, thread: int, nbytes: int, round_: int
    ) -> None:
        label: Label = (name, keys[0] if keys else None, len(keys))
        self._under_way[seq, peer] = [at, thread, label, nbytes, round_, False]

    def _answer(self, seq: int, peer: bytes, at: float, thread: int) -> bytes:
        asked = self._under_way.pop((seq, peer), None)
        if asked is None:
            return b""
        asked_at, asker, label, nbytes, round_, told = asked
        number = self._labels[peer]
        if told:
            return _row(ANSWERED, 0, number, 0, thread, 0.0, at, 0.0, 0, 0, seq)
        return _row(REQUEST, self._labels[label], number, asker, thread, asked_at, at, 0.0, nbytes, round_, seq)

    def _handle(
        self,
        start: float,
        left: float,
        end: float,
        thread: int,
        name: str,
        node: Sequence[Any],
        seq: int,
        nbytes: int,
        round_: int,
        answered: Sequence[tuple[Sequence[Any], int]],
    ) -> bytes:
        nodes, count = self._nodes, min(len(answered), MOST_ANSWERS)
        made = [_row(HANDLED, self._labels[name], nodes[node], thread, 0, start, end, left, nbytes, round_, seq)]
        for place in range(1, count, 2):
            (one, one_seq), (other, other_seq) = answered[place - 1 : place + 1]
            made.append(_row(REPLIES, nodes[one], nodes[other], 0, 2, 0.0, 0.0, 0.0, one_seq, other_seq, 0))
        if count % 2:
            one, one_seq = answered[count - 1]
            made.append(_row(REPLIES, nodes[one], 0, 0, 1, 0.0, 0.0, 0.0, one_seq, 0, 0))
        return b"".join(made)

    def _mark(self, text: str, at: float) -> bytes:
        return _row(MARK, self._labels[text], 0, 0, 0, at, 0.0, 0.0, 0, 0, 0)

    # ---- for the thread of the heartbeat

    def chunks(self, node: wire.Node) -> list[wire.TraceChunk]:
        """Take out what has been noted, as the chunks that carry it; without news, nothing.

        News are, too, that the rounds are over, and how far the clocks are apart, if earlier chunks did not say that.
        """
        over, settled = self.over, self.offsets.settled
        rows, labels, nodes = self._taken()
        made: list[wire.TraceChunk] = []
        if rows or (over and not self._told) or (settled and self._unsettled):
            threads, known = self._threads(), self.offsets.known
            for start in range(0, max(1, len(rows)), MOST_RECORDS * ROW.size):
                part = rows[start : start + MOST_RECORDS * ROW.size]
                count = len(part) // ROW.size
                made.append(
                    wire.TraceChunk(node, known, threads, over, self._first, count, packed(labels, nodes, part))
                )
                self._first += count
        lost, self._lost = self._lost, 0
        self._first += lost
        self._told = over
        self._unsettled = not settled and (self._unsettled or bool(made))
        return made

    def _taken(self) -> tuple[bytes, list[tuple[int, Label]], list[tuple[int, wire.Node]]]:
        """Take out the rows, the rows of open requests that no chunk has told of, and the words in them."""
        with self._writing:
            self._write()
            under_way = list(self._under_way.items())
            for asked_before, _ in under_way[:-MOST_UNDER_WAY]:
                del self._under_way[asked_before]
            for (seq, peer), asked in under_way:
                at, thread, label, nbytes, round_, told = asked
                if not told:
                    asked[-1] = True
                    number = self._labels[peer]
                    self._rows += _row(ASKED, self._labels[label], number, thread, 0, at, 0.0, 0.0, nbytes, round_, seq)
            rows, self._crowd = bytes(self._rows), False
            self._rows.clear()
            labels = [(number, _label(value)) for number, value in self._labels.take()]
            return rows, labels, self._nodes.take()

    def _threads(self) -> list[list[Any]]:
        """Return the numbers and names of threads that there are or have been."""
        for thread in threading.enumerate():
            if thread.ident is not None:
                self._known_threads[thread.ident] = thread.name[:128]
        while len(self._known_threads) > MOST_THREADS:
            del self._known_threads[next(iter(self._known_threads))]
        return [[ident, name] for ident, name in self._known_threads.items()]


def _label(value: Label | str | bytes) -> Label:
    """Return the label that a number stands for; names, texts and peers are labels without keys."""
    if isinstance(value, tuple):
        return value
    return (value if isinstance(value, str) else value.decode()), None, 0


def _nothing() -> None: ...
