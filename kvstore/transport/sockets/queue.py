"""The messages that have not left over one link, in the order in which they leave. Pure.

A message with a priority leaves before those of lower priority, so that what is needed next does not wait behind all
that was produced before it (P3, Jayarajan et al. 2019). A message that has begun to leave is finished first. A message
without a priority overtakes none, and no later message overtakes it.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvstore import wire


class _Waiting(NamedTuple):
    """A message that waits. They sort in the order in which they leave."""

    section: int  # a message without a priority, or those between two such messages
    rank: int
    number: int
    parts: Sequence[wire.Buffer]


class Outgoing:
    """The queue of one link."""

    def __init__(self) -> None:
        self._begun: deque[wire.Buffer] = deque()
        self._left = 0  # bytes of these
        self._waiting: list[_Waiting] = []
        self._section = 0
        self._numbers = itertools.count()

    def __bool__(self) -> bool:
        """Whether anything waits."""
        return bool(self._begun) or bool(self._waiting)

    def put(self, parts: Sequence[wire.Buffer], priority: int | None = None) -> None:
        """Add a message: its bytes in parts, none of them empty."""
        rank = 0
        if priority is None:
            self._section += 1
        else:
            rank = -priority
        heapq.heappush(self._waiting, _Waiting(self._section, rank, next(self._numbers), parts))
        if priority is None:
            self._section += 1

    def first(self, part: wire.Buffer) -> None:
        """Let ``part`` leave before all else. Nothing may have begun to leave."""
        self._begun.appendleft(part)
        self._left += len(part)

    def head(self, most: int) -> list[wire.Buffer]:
        """Return what leaves next: at most ``most`` parts, all of one message, which counts as begun."""
        if not self._begun:
            self._begun.extend(heapq.heappop(self._waiting).parts)
            self._left = sum(map(len, self._begun))
        return list(itertools.islice(self._begun, most))

    def gone(self, nbytes: int) -> None:
        """Note that the next ``nbytes`` bytes have left."""
        self._left -= nbytes
        if not self._left:  # the usual case
            self._begun.clear()
            return
        while nbytes:
            part = self._begun[0]
            if nbytes < len(part):
                self._begun[0] = memoryview(part)[nbytes:]
                return
            nbytes -= len(part)
            self._begun.popleft()

    def clear(self) -> None:
        """Drop all messages."""
        self._begun.clear()
        self._left = 0
        self._waiting.clear()

    def detach(self) -> None:
        """Replace all parts by copies."""
        self._begun = deque(_copies(self._begun))
        self._waiting = [entry._replace(parts=_copies(entry.parts)) for entry in self._waiting]


def _copies(parts: Iterable[wire.Buffer]) -> list[wire.Buffer]:
    return [bytes(part) for part in parts]
