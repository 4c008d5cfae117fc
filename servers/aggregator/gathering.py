"""Which pushes of a host's workers belong together, and when no more of them can come. Pure.

Pushes of one list of segments at the same clocks make a group. It is complete when every worker has pushed that can
still do so. A worker cannot if it has left, if it is inside ``join`` and its last push was an earlier one, or if it has
pushed one of the segments as often already, in another list. So workers that push other lists hold nobody up.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from kvstore import wire
from kvstore.values.addresses import Column
from servers.aggregator.segments import HostSegments, SegmentList

ClockKey: TypeAlias = "int | tuple[int, ...]"


class Pushed(NamedTuple):
    """A worker's push, and the link that it came over.

    Attributes:
        peer: the link.
        request: the push.
        lent: its values, flat, in memory of a device that the worker has lent; None if the request has them.
    """

    peer: bytes
    request: wire.Push
    lent: torch.Tensor | None = None


class Pulled(NamedTuple):
    """A worker's pull, and the link that it came over."""

    peer: bytes
    request: wire.Pull


Asker: TypeAlias = "Pushed | Pulled"


class Group:
    """Pushes that belong together.

    Args:
        listed: the segments.
        clocks: of the segments.
        since: when the first push came.

    Attributes:
        listed, clocks, since: see above.
        last_at: when the last push came before that which has completed it.
        pushes: by rank, in the order in which they came.
    """

    def __init__(self, listed: SegmentList, clocks: Sequence[int], since: float) -> None:
        self.listed = listed
        self.clocks = clocks
        self.since = since
        self.last_at = since
        self.pushes: dict[int, Pushed] = {}

    @property
    def key(self) -> ClockKey:
        """What the clocks of another push must be equal to."""
        return clock_key(self.clocks)


def clock_key(clocks: Sequence[int]) -> ClockKey:
    """Return ``clocks`` as a key: one number where all are equal."""
    return clocks[0] if clocks.count(clocks[0]) == len(clocks) else tuple(clocks)


class Gathering:
    """The open groups of one store.

    Args:
        workers: the ranks of this host's workers.
        segments: of the store.
    """

    def __init__(self, workers: Sequence[int], segments: HostSegments) -> None:
        self._rows = {rank: row for row, rank in enumerate(workers)}
        self._segments = segments
        self._pushed = np.zeros((len(workers), 0), np.int64)  # how often each worker has pushed each segment
        self._paused: dict[int, Column] = {}  # by rank: how often it has pushed each segment when it joined
        self._departed: frozenset[int] = frozenset()
        self._open: dict[SegmentList, dict[ClockKey, Group]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._open.values()))

    @property
    def rounds(self) -> int:
        """How often the most pushed segment has been pushed."""
        return int(self._pushed.max(initial=0))

    def groups(self) -> list[Group]:
        """Return the open groups."""
        return [group for groups in self._open.values() for group in groups.values()]

    def add(self, listed: SegmentList, rank: int, asker: Pushed, now: float) -> list[Group]:
        """Take a push; return the groups that are complete, which are open no longer."""
        clocks = asker.request.clocks
        row = self._row(rank)
        row[listed.places] = np.maximum(row[listed.places], clocks)
        paused = self._paused.get(rank)
        if paused is not None and bool((row[listed.places] > self._known(paused)[listed.places]).any()):
            self._paused.clear()  # it goes on, so all workers have joined
        groups = self._open.setdefault(listed, {})
        group = groups.get(clock_key(clocks))
        if group is None:
            group = groups[clock_key(clocks)] = Group(listed, clocks, now)
        group.pushes[rank] = asker
        beside = [other for near in listed.others for other in self._open.get(near, {}).values()]
        complete = self._complete([group, *beside])
        if group not in complete:
            group.last_at = now
        return complete

    def pause(self, rank: int, clocks: Mapping[int, int]) -> list[Group]:
        """Note that a worker pushes nothing after ``clocks``, by segment; return the groups that are complete now."""
        paused = np.zeros(len(self._segments), np.int64)
        paused[self._segments.places(list(clocks))] = list(clocks.values())
        self._paused[rank] = paused
        return self._complete(self.groups())

    def depart(self, ranks: Collection[int]) -> list[Group]:
        """Note who has left; return the groups that are complete now."""
        self._departed = frozenset(ranks)
        return self._complete(self.groups())

    def take(self, group: Group) -> Group:
        """Close ``group``, whoever is missing; return it."""
        groups = self._open[group.listed]
        del groups[group.key]
        if not groups:
            del self._open[group.listed]
        return group

    def missing(self, group: Group) -> list[int]:
        """Return the workers whose pushes can still come."""
        return [rank for rank in self._rows if rank not in group.pushes and self._can_come(rank, group)]

    @property
    def busy(self) -> set[SegmentList]:
        """The lists with open groups."""
        return set(self._open)

    def _complete(self, groups: Sequence[Group]) -> list[Group]:
        return [self.take(group) for group in groups if len(group.pushes) == len(self._rows) or not self.missing(group)]

    def _can_come(self, rank: int, group: Group) -> bool:
        if rank in self._departed:
            return False
        places = group.listed.places
        if bool((self._row(rank)[places] >= group.clocks).any()):
            return False
        paused = self._paused.get(rank)
        return paused is None or bool((self._known(paused)[places] >= group.clocks).all())

    def _row(self, rank: int) -> Column:
        short = len(self._segments) - self._pushed.shape[1]
        if short > 0:
            self._pushed = np.pad(self._pushed, ((0, 0), (0, max(short, self._pushed.shape[1]))))
        row: Column = self._pushed[self._rows[rank]]
        return row

    def _known(self, paused: Column) -> Column:
        """Return ``paused`` with a number for each segment that there is by now."""
        short = len(self._segments) - len(paused)
        return np.pad(paused, (0, short)) if short > 0 else paused
