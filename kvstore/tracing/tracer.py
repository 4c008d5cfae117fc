"""What one process notes for the job's trace: rows of bytes, and the chunks that carry them away.

Any thread may note something; the thread of the heartbeat takes the rows out. A row costs less than a microsecond, and
leaves as it was written: while the heartbeat encoded something, the program's thread would wait for the interpreter. No
object stays behind for the garbage collector. When rows come faster than they are taken out, the newest are lost, and
the gap in their numbers says how many.

One statement appends a row, whole, and one takes all of them: the interpreter's lock makes each a single step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvstore.job.valid_values import RoundWindow
from kvstore.spec import Key
from kvstore.tracing.offsets import ClockOffsets
from kvstore.tracing.words import Words
from kvstore.wire import Node, TraceChunk
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

MOST_UNDER_WAY = 1 << 14  # requests without an answer that are remembered: some never have one
_ident = threading.get_ident
_row = ROW.pack
NOBODY = ("", -1, 0)  # who has asked for what is done without a request


class Tracer:
    """The notes of one process.

    Args:
        window: the rounds that are of interest.
        clock: seconds, monotonic.
        most: rows that wait at most.

    Attributes:
        clock, window: see above.
        open: whether what happens now is of interest. Before the first round it is if that round is.
        round: the latest round of this process; 0 before the first.
        offsets: of the clock.
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
        self._room = max(1, most * 3 // 4) * ROW.size  # with more, somebody is to take them out
        self._rows = bytearray()
        self._crowd = False  # whether somebody has been woken since
        self._lost = 0  # rows since the last chunk
        self._first = 1  # the number of the next chunk's first row
        self._labels = Words()
        self._nodes = Words()
        # Requests that have been noted, and their answers have not: when asked, by which thread, label, bytes, round,
        # the number of the peer, and whether a chunk tells of it. An aggregator's have two series of numbers.
        self._under_way: dict[tuple[int, bytes], list[Any]] = {}
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
            self._rows.clear()
            self._under_way.clear()
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
        label = self._labels[name, keys[0] if keys else None, len(keys)]
        about = self.round if round_ is None else round_
        rows = self._rows
        rows += _row(SPAN, label, 0, _ident(), 0, start, self.clock(), 0.0, nbytes, about, 0)
        if len(rows) > self._room:
            self._crowded()

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
        labels = self._labels
        label = labels[name, keys[0] if keys else None, len(keys)]
        self._under_way[seq, peer] = [self.clock(), _ident(), label, nbytes, self.round, labels[peer], False]

    def answered(self, seq: int, peer: bytes) -> None:
        """Note that request ``seq`` to ``peer`` has been answered, if it was noted."""
        asked = self._under_way.pop((seq, peer), None)
        if asked is None:
            return
        at, thread, label, nbytes, round_, number, told = asked
        rows = self._rows
        if told:
            rows += _row(ANSWERED, 0, self._labels[peer], 0, _ident(), 0.0, self.clock(), 0.0, 0, 0, seq)
        else:
            rows += _row(REQUEST, label, number, thread, _ident(), at, self.clock(), 0.0, nbytes, round_, seq)
        if len(rows) > self._room:
            self._crowded()

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
        nodes, count = self._nodes, min(len(answered), MOST_ANSWERS)
        label, number = self._labels[name], nodes[node]
        made = [_row(HANDLED, label, number, _ident(), 0, start, self.clock(), left, nbytes, round_, seq)]
        for place in range(1, count, 2):
            (one, one_seq), (other, other_seq) = answered[place - 1 : place + 1]
            made.append(_row(REPLIES, nodes[one], nodes[other], 0, 2, 0.0, 0.0, 0.0, one_seq, other_seq, 0))
        if count % 2:
            one, one_seq = answered[count - 1]
            made.append(_row(REPLIES, nodes[one], 0, 0, 1, 0.0, 0.0, 0.0, one_seq, 0, 0))
        rows = self._rows
        rows += b"".join(made)  # in one step: replies belong to the row before them
        if len(rows) > self._room:
            self._crowded()

    def mark(self, text: str, at: float | None = None) -> None:
        """Note that something has happened now, or ``at`` another time."""
        rows, label = self._rows, self._labels[text[:512]]
        rows += _row(MARK, label, 0, 0, 0, self.clock() if at is None else at, 0.0, 0.0, 0, 0, 0)
        if len(rows) > self._room:
            self._crowded()

    def _crowded(self) -> None:
        """Have somebody take out the rows; those beyond the limit are lost."""
        excess = len(self._rows) - self._most
        if excess > 0:
            del self._rows[self._most :]
            self._lost += excess // ROW.size
        if not self._crowd:
            self._crowd = True
            self.wake()

    # ---- for the thread of the heartbeat

    def chunks(self, node: Node) -> list[TraceChunk]:
        """Take out what has been noted, as the chunks that carry it; without news, nothing.

        News are, too, that the rounds are over, and how far the clocks are apart, if earlier chunks did not say that.
        """
        over, settled = self.over, self.offsets.settled
        rows, labels, nodes = self._taken()
        made: list[TraceChunk] = []
        if rows or (over and not self._told) or (settled and self._unsettled):
            threads, known = self._threads(), self.offsets.known
            for start in range(0, max(1, len(rows)), MOST_RECORDS * ROW.size):
                part = rows[start : start + MOST_RECORDS * ROW.size]
                count = len(part) // ROW.size
                made.append(TraceChunk(node, known, threads, over, self._first, count, packed(labels, nodes, part)))
                self._first += count
        lost, self._lost = self._lost, 0
        self._first += lost
        self._told = over
        self._unsettled = not settled and (self._unsettled or bool(made))
        return made

    def _taken(self) -> tuple[bytes, list[tuple[int, Label]], list[tuple[int, Node]]]:
        """Take out the rows, those of open requests that have not been told of, and the words in them."""
        self._labels.clear()
        self._nodes.clear()
        rows = bytes(self._rows)
        del self._rows[: len(rows)]
        self._crowd = False
        under_way = list(self._under_way.items())
        for asked_before, _ in under_way[:-MOST_UNDER_WAY]:
            self._under_way.pop(asked_before, None)
        for (seq, _), asked in under_way:
            at, thread, label, nbytes, round_, number, told = asked
            if not told:
                asked[-1] = True
                rows += _row(ASKED, label, number, thread, 0, at, 0.0, 0.0, nbytes, round_, seq)
        return rows, [(number, _label(value)) for number, value in self._labels.take()], self._nodes.take()

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


def _nothing() -> None:
    """Wake nobody."""
