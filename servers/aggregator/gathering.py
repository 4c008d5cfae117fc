"""Which pushes of a host's workers belong together, and when no more of them can come. Pure.

Pushes of one list of segments at the same clocks make a group. It is complete when every worker has pushed that can
still do so. A worker cannot if it has left, if it is inside ``join`` and its last push was an earlier one, or if it has
pushed one of the segments as often already, in another list. So workers that push other lists hold nobody up.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from kvstore import wire
from kvstore.errors import KeyNotInitialized, Mismatch, UsageError
from kvstore.spec import ITEMSIZE, Key, sum_dtype
from kvstore.values.any_arrays import Column

ClockKey: TypeAlias = "int | tuple[int, ...]"


MOST_LISTS = 4096  # that are kept: programs push the same lists again, unless they make a new one for each push


class KnownSegment(NamedTuple):
    """A segment: of which key, on which server, how many elements of which dtype."""

    key: Key
    server: int
    size: int
    dtype: str


class SegmentList:
    """Segments on one server, of one dtype, which one message carries.

    Attributes:
        places: of the segments among all of the store.
        sizes, size, nbytes: elements of each, elements and bytes of all.
        others: other lists that have some of the segments, too.
    """

    def __init__(self, ids: tuple[int, ...], places: Column, segments: Sequence[KnownSegment]) -> None:
        if len({(segment.server, segment.dtype) for segment in segments}) != 1:
            raise UsageError("expected segments of one server and one dtype in a message")
        self.ids = ids
        self.places = places
        self.segments = segments
        self.server, self.dtype = segments[0].server, segments[0].dtype
        self.sizes = [segment.size for segment in segments]
        self.size = sum(self.sizes)
        self.nbytes = self.size * ITEMSIZE[self.dtype]
        self.sum_dtype = sum_dtype(self.dtype)
        self.sum_bytes = self.size * ITEMSIZE[self.sum_dtype]
        self.others: set[SegmentList] = set()

    @property
    def keys(self) -> dict[Key, None]:
        return dict.fromkeys(segment.key for segment in self.segments)


class HostSegments:
    """The segments of one store, as the workers of this host know them."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}  # by id
        self._segments: list[KnownSegment] = []
        self._lists: dict[tuple[int, ...], SegmentList] = {}
        self._with: dict[int, set[SegmentList]] = {}  # by id: the lists that it is in

    def __len__(self) -> int:
        return len(self._segments)

    def add(self, message: wire.Describe) -> None:
        """Take a worker's description of segments. Other workers send the same, or it is a ``Mismatch``."""
        new: dict[int, KnownSegment] = {}
        at = 0
        for key, kind, count in zip(message.keys, message.kinds, message.counts, strict=True):
            for number in range(at, at + count):
                segment = KnownSegment(key, message.servers[number], message.sizes[number], message.dtypes[kind])
                place = self._places.get(message.ids[number])
                if place is None:
                    new[message.ids[number]] = segment
                elif self._segments[place] != segment:
                    raise Mismatch(f"{message.node} and another worker of this host describe {key!r} differently")
            at += count
        self._places |= {number: place for place, number in enumerate(new, len(self._segments))}
        self._segments += new.values()

    def places(self, ids: Sequence[int]) -> Column:
        """Return the places of segments among all of the store."""
        try:
            return np.fromiter(map(self._places.__getitem__, ids), np.int64, len(ids))
        except KeyError as exc:
            raise KeyNotInitialized(f"segment {exc.args[0]} is not known to this aggregator; call init first") from None

    def key(self, number: int) -> Key:
        return self._segments[int(self.places([number])[0])].key

    def size(self, number: int) -> int:
        return self._segments[int(self.places([number])[0])].size

    def listed(self, ids: Sequence[int]) -> SegmentList:
        """Return the list of segments ``ids``, always the same object."""
        wanted = tuple(ids)
        known = self._lists.get(wanted)
        if known is not None:
            return known
        places = self.places(wanted)
        made = SegmentList(wanted, places, list(map(self._segments.__getitem__, places.tolist())))
        for number in wanted:
            beside = self._with.setdefault(number, set())
            made.others |= beside
            beside.add(made)
        for other in made.others:
            other.others.add(made)
        self._lists[wanted] = made
        return made

    def forget(self, busy: set[SegmentList]) -> None:
        """Forget lists that are not ``busy``, if there are very many."""
        if len(self._lists) <= MOST_LISTS:
            return
        for ids in [ids for ids, listed in self._lists.items() if listed not in busy]:
            gone = self._lists.pop(ids)
            for number in ids:
                self._with[number].discard(gone)
            for other in gone.others:
                other.others.discard(gone)


class Pushed(NamedTuple):
    """A worker's push, and the link that it came over."""

    peer: bytes
    request: wire.Push
    lent: torch.Tensor | None = None  # its values, flat, in lent memory of a device; None if the request has them


class Pulled(NamedTuple):
    """A worker's pull, and the link that it came over."""

    peer: bytes
    request: wire.Pull


Asker: TypeAlias = "Pushed | Pulled"


@dataclass(eq=False)
class Group:
    """Pushes that belong together."""

    listed: SegmentList
    clocks: Sequence[int]
    since: float  # when the first push came
    last_at: float  # when the last push came before the one that completes it
    pushes: dict[int, Pushed] = field(default_factory=dict)  # by rank, in the order of their coming

    @property
    def key(self) -> ClockKey:
        """What the clocks of another push must be equal to."""
        return clock_key(self.clocks)


def clock_key(clocks: Sequence[int]) -> ClockKey:
    """Return ``clocks`` as a key: one number where all are equal."""
    return clocks[0] if clocks.count(clocks[0]) == len(clocks) else tuple(clocks)


class Gathering:
    """The open groups of one store."""

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
            group = groups[clock_key(clocks)] = Group(listed, clocks, now, now)
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

    def depart(self, ranks: Collection[int], lost: Collection[int] = ()) -> list[Group]:
        """Note which workers push nothing more; return the groups that are complete now.

        The pushes of a ``lost`` worker that are still here are dropped. The worker that is started again in its place
        pushes these rounds itself, to the servers.
        """
        self._departed = frozenset((*ranks, *lost))
        for group in self.groups() if lost else ():
            for rank in lost:
                group.pushes.pop(rank, None)
            if not group.pushes:
                self.take(group)
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
