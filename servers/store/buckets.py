"""The buckets of one store: its segments, grouped as workers push them; and its tables.

Pushing several whole buckets merges them, if none has an open round. Pushing part of a bucket splits it. Neither
changes a bit of the values, nor the rounds, nor which requests wait for them.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import torch

from kvstore.errors import AlreadyInitialized, KeyNotInitialized, UsageError, WeightsInDoubt, again
from kvstore.spec import Key, Spec, shorten
from kvstore.transport.memory import Memory
from kvstore.values import PayloadRange, TensorRange, cut
from servers.store.bucket import Bucket, Contribution, Progress
from servers.store.recording import Recording
from servers.store.row_target import RowTarget, TableGroups
from servers.store.target import AnyTarget, HeldSegment, HeldSegments

log = logging.getLogger(__name__)

NO_MORE = "; no push or pull of these keys is served any more: go on from a checkpoint"
MAX_SPLITS = 2  # segments that were split more often are not merged again: workers push different lists


class Buckets:
    """The buckets of one store.

    Attributes:
        grouping: another object whenever segments have come, or are grouped otherwise.
        groups: of its tables.
        doubts: the segments whose values an optimizer may have half updated, and how. Whoever reads or updates segments
            looks here first, and then does not. A dict of segments, for buckets and groups are split and merged.
    """

    def __init__(self, rounds: Callable[[], Progress], memory: Memory, recording: Recording | None = None) -> None:
        self.grouping = object()
        self.groups = TableGroups()
        self.doubts: dict[int, WeightsInDoubt] = {}
        self._rounds = rounds
        self._memory = memory
        self._recording = recording or Recording()
        self._at: dict[int, Bucket] = {}  # by segment
        self._tables: dict[int, RowTarget] = {}  # by segment, each of which is a stripe
        self.moved: set[Key] = set()  # the keys of arrays whose rows tables have now
        # What is pushed together, by ids: its buckets, which are whole, and where in them the elements are.
        self._lists: dict[tuple[int, ...], list[Bucket]] = {}
        self._elements: dict[tuple[int, ...], list[tuple[Bucket, int, int]]] = {}
        self._size: tuple[object, int] = (None, 0)  # see ``sum_bytes``, with the grouping that it is of

    @property
    def ids(self) -> Collection[int]:
        return self._at.keys() | self._tables.keys() if self._tables else self._at.keys()

    def doubt(self, ids: Collection[int], error: WeightsInDoubt) -> WeightsInDoubt:
        """Serve segments ``ids`` no more, because of ``error``; tell the standby. Return what to tell workers."""
        made = WeightsInDoubt(f"{error}{NO_MORE}")
        made.__cause__ = error.__cause__ or error
        log.error("%s", made, exc_info=made.__cause__)
        self.doubts |= dict.fromkeys(ids, made)
        self._recording.doubt(ids, made)
        return made

    def follow_doubt(self, ids: Collection[int], why: str) -> None:
        self.doubts |= dict.fromkeys(ids, WeightsInDoubt(why))

    def doubt_of(self, ids: Collection[int]) -> WeightsInDoubt | None:
        if not self.doubts:
            return None
        return next((again(self.doubts[number]) for number in ids if number in self.doubts), None)

    def require_sound(self, ids: Collection[int]) -> None:
        """Raise ``WeightsInDoubt`` if one of segments ``ids`` is not served."""
        error = self.doubt_of(ids)
        if error is not None:
            raise error

    @property
    def tables(self) -> Collection[RowTarget]:
        """All tables, each in no group."""
        self.groups.split_all()
        return self._tables.values()

    def read_tables(self, ids: Collection[int] | None = None) -> list[RowTarget]:
        """Return tables whose rows are only read, by their segments; all by default. They may be in groups."""
        return list(self._tables.values() if ids is None else map(self._table, ids))

    def is_table(self, number: int) -> bool:
        return number in self._tables

    @property
    def sum_bytes(self) -> int:
        grouping, nbytes = self._size
        if grouping is not self.grouping:
            nbytes = sum(bucket.sum_bytes for bucket in self.all())
            self._size = self.grouping, nbytes
        return nbytes

    def all(self) -> list[Bucket]:
        return list(dict.fromkeys(self._at.values()))

    def targets(self) -> list[AnyTarget]:
        return [*self.all(), *dict.fromkeys(target.group or target for target in self._tables.values())]

    def target(self, number: int) -> AnyTarget:
        target = self._tables.get(number)
        return self.holding(number) if target is None else target.group or target

    def targets_of(self, ids: Sequence[int]) -> Sequence[AnyTarget]:
        if self._tables and not self._tables.keys().isdisjoint(ids):
            return list(dict.fromkeys(map(self.target, ids)))
        return self.of(ids)

    def table(self, number: int) -> RowTarget:
        """Return the table of segment ``number``, in no group."""
        return self.groups.split(self._table(number))

    def _table(self, number: int) -> RowTarget:
        target = self._tables.get(number)
        if target is not None:
            return target
        raise UsageError(
            f"key {self.segment(number).key!r} is an array: it has no rows that are pushed or pulled by ids"
        )

    def tables_of(self, ids: Sequence[int]) -> list[RowTarget]:
        return list(map(self.table, ids))

    def require_new_tables(self, ids: Sequence[int]) -> None:
        for number in ids:
            known = self._tables.get(number)
            if number in self._at or (known is not None and not self.target(number).rounds.untouched):
                raise _initialized(self.target(number), number)

    def add_table(self, target: RowTarget) -> None:
        """Take a new table, perhaps in place of one that an init has made which was interrupted."""
        if target.number in self._tables:
            self.groups.split(self._tables[target.number])
        self._tables[target.number] = target
        if target.description.parameter is not None:
            self.moved.add(target.description.parameter)

    def add(
        self, ids: Sequence[int], keys: Sequence[Key], specs: Sequence[Spec], ranges: Sequence[PayloadRange]
    ) -> None:
        """Take new segments of one dtype, and their first values."""
        if not ids:
            return
        for number in ids if self._tables else ():
            if number in self._tables:
                raise _initialized(self._tables[number], number)
        if not self._at.keys().isdisjoint(ids):
            self._add_again(ids, keys, specs, ranges)
            return
        segments = HeldSegments(ids, keys, specs, (0,) * len(ids))  # of one key always the same tuple
        bucket = Bucket(segments, specs[0].dtype, self._rounds(), self._memory)
        bucket.load(ranges)
        self._put(bucket)

    def _add_again(
        self, ids: Sequence[int], keys: Sequence[Key], specs: Sequence[Spec], ranges: Sequence[PayloadRange]
    ) -> None:
        """Take first values of segments of which some have been here before.

        An earlier init was interrupted before any worker knew of it. Or the values are published, and nobody pushes to
        them: another worker, in place of a lost one, may send them in other groups, and new ones with them.
        """
        for number, spec in zip(ids, specs, strict=True):
            if number in self._at:
                bucket, place = self.find(number)
                if bucket.segments.specs[place] != spec or not bucket.rounds.untouched:
                    raise _initialized(bucket, number)
        if (first := self._at.get(ids[0])) is not None and first.ids == tuple(ids):
            first.assign([ranges])
        elif len(ids) == 1:
            self._grouped(tuple(ids)).assign([ranges])
        else:
            starts = list(itertools.accumulate((spec.size for spec in specs), initial=0))
            for number, key, spec, start in zip(ids, keys, specs, starts[:-1], strict=True):
                self.add([number], [key], [spec], cut(ranges, start, start + spec.size))

    def segment(self, number: int) -> HeldSegment:
        bucket, place = self.find(number)
        return bucket.segments.segment(place)

    def value(self, number: int) -> torch.Tensor:
        """Return a view of the value of segment ``number``, in its shape."""
        bucket, place = self.find(number)
        start = bucket.starts[place]
        return bucket.value[start : start + bucket.sizes[place]].view(bucket.segments.specs[place].shape)

    def find(self, number: int) -> tuple[Bucket, int]:
        bucket = self.holding(number)
        return bucket, bucket.places[number]

    def holding(self, number: int) -> Bucket:
        try:
            return self._at[number]
        except KeyError:
            if number in self._tables:
                target = self._tables[number]
                raise UsageError(
                    f"key {target.name!r} is {target.description}: its rows are pushed and pulled by their ids"
                ) from None
            raise KeyNotInitialized(
                f"segment {number} has no value on this server: its key was not initialized, or the store was closed"
            ) from None

    def of(self, ids: Sequence[int]) -> list[Bucket]:
        listed = self._lists.get(tuple(ids))
        if listed is not None:
            return listed
        return list(dict.fromkeys(map(self.holding, ids)))

    def segment_ranges(self, ids: Sequence[int]) -> list[tuple[Bucket, int, int]]:
        """Return where segments ``ids`` are, in order: (bucket, start, stop), in places."""
        whole = self._lists.get(tuple(ids))
        if whole is not None:
            return [(bucket, 0, len(bucket.ids)) for bucket in whole]
        ranges: list[tuple[Bucket, int, int]] = []
        for number in ids:
            bucket, place = self.find(number)
            if ranges and ranges[-1][0] is bucket and ranges[-1][2] == place:
                ranges[-1] = (bucket, ranges[-1][1], place + 1)
            else:
                ranges.append((bucket, place, place + 1))
        return ranges

    def element_ranges(self, ids: Sequence[int]) -> Sequence[tuple[Bucket, int, int]]:
        """Return where the values of segments ``ids`` are, in order: (bucket, start, stop), in elements."""
        listed = tuple(ids)
        known = self._elements.get(listed)
        if known is not None:
            return known
        ranges = [
            (bucket, bucket.starts[first], bucket.starts[stop - 1] + bucket.sizes[stop - 1])
            for bucket, first, stop in self.segment_ranges(ids)
        ]
        if listed in self._lists:
            self._elements[listed] = ranges
        return ranges

    def versions(self, ids: Sequence[int]) -> list[int]:
        return [self.target(number).rounds.version for number in ids]

    def pushed(self, ids: Sequence[int], clocks: Sequence[int]) -> list[Bucket]:
        """Split and merge buckets so that ``ids`` are whole buckets, each with one clock; return them in order."""
        listed = tuple(ids)
        if clocks.count(clocks[0] if clocks else 0) < len(clocks):
            return self._divide(listed, clocks)
        divided = self._lists.get(listed)  # a list of thousands of keys is looked at once, not once a round
        if divided is None:
            divided = self._divide(listed, clocks)
        if len(divided) > 1 and self._may_merge(divided):
            divided = [self._merge(divided)]
        self._lists[listed] = divided
        return divided

    def _divide(self, ids: tuple[int, ...], clocks: Sequence[int]) -> list[Bucket]:
        for number in ids:
            self.holding(number)
        divided: list[Bucket] = []
        at = 0
        while at < len(ids):
            bucket = self._at[ids[at]]
            end = at + len(bucket.ids)
            if ids[at:end] != bucket.ids or len(set(clocks[at:end])) > 1:
                self._split(bucket)
                bucket = self._at[ids[at]]
            divided.append(bucket)
            at += len(bucket.ids)
        if len({bucket.dtype for bucket in divided}) > 1:
            raise UsageError("segments of several dtypes in one message")
        return divided

    def apart(self, clocks: Mapping[int, int]) -> list[Bucket]:
        """Split buckets so that the segments of each have one clock among ``clocks``, or none; return all buckets.

        Groups of tables are split.
        """
        self.groups.split_all()
        for bucket in self.all():
            if len({clocks.get(number) for number in bucket.ids}) > 1:
                self._split(bucket)
        return self.all()

    def group(self, ids: Sequence[int], sizes: Sequence[int]) -> list[Bucket]:
        """Split and merge buckets to be as another server's: the first ``sizes[0]`` of ``ids`` are one, and so on."""
        if sum(sizes) != len(ids):
            raise ValueError(f"{len(ids)} segments cannot be buckets of {sum(sizes)}")
        stops = list(itertools.accumulate(sizes))
        return [self._grouped(tuple(ids[stop - size : stop])) for stop, size in zip(stops, sizes, strict=True)]

    def _grouped(self, ids: tuple[int, ...]) -> Bucket:
        if not all(number in self._at for number in ids):
            raise ValueError(f"segments {shorten(ids)} are not all here")
        if self._at[ids[0]].ids == ids:
            return self._at[ids[0]]
        if len(ids) == 1:
            self._split(self._at[ids[0]])
            return self._at[ids[0]]
        buckets = list(dict.fromkeys(map(self._at.__getitem__, ids)))
        if tuple(itertools.chain(*(bucket.ids for bucket in buckets))) != ids:
            raise ValueError(f"segments {shorten(ids)} are not whole buckets")
        return self._merge(buckets)

    def restore(self, segments: HeldSegments, dtype: str) -> Bucket:
        """Return a new bucket of ``segments``, which are not here yet, for another server's value and progress."""
        bucket = Bucket(segments, dtype, self._rounds(), self._memory)
        self._put(bucket)
        return bucket

    def _may_merge(self, buckets: Sequence[Bucket]) -> bool:
        # Waiting requests and open contributions would have to be joined of parts that may never all come.
        state = buckets[0].rounds.state
        return all(b.idle and b.rounds.state == state and b.segments.splits[0] < MAX_SPLITS for b in buckets)

    def _merge(self, buckets: Sequence[Bucket]) -> Bucket:
        segments = HeldSegments.joined([bucket.segments for bucket in buckets])
        merged = Bucket(segments, buckets[0].dtype, buckets[0].rounds.copy(), self._memory)
        torch.cat([bucket.value for bucket in buckets], out=merged.value)
        for rank in set.intersection(*(set(bucket.read_by) for bucket in buckets)):
            merged.read_by[rank] = torch.cat([bucket.read_by[rank] for bucket in buckets])
        for bucket in buckets:
            merged.failures |= bucket.failures
        merged.changes = max(bucket.changes for bucket in buckets)
        self._put(merged)
        if self._recording.on:
            self._recording.grouped([merged])
        return merged

    def _split(self, bucket: Bucket) -> None:
        singles: list[Bucket] = []
        for place, number in enumerate(bucket.ids):
            segment = bucket.segments.segment(place)
            start = bucket.starts[place]
            stop = start + bucket.sizes[place]
            segments = HeldSegments([number], [segment.key], [segment.spec], [segment.splits + 1])
            single = Bucket(segments, bucket.dtype, bucket.rounds, self._memory)
            single.load([TensorRange(0, bucket.value[start:stop])])
            single.read_by = {rank: values[start:stop].clone() for rank, values in bucket.read_by.items()}
            single.failures = dict(bucket.failures)
            single.changes = bucket.changes
            singles.append(single)

        def part_of(item: Contribution, place: int) -> Contribution:
            start = bucket.starts[place]
            return replace(item, ranges=cut(item.ranges, start, start + bucket.sizes[place]))

        bucket.divide(singles, part_of)
        for single in singles:
            self._put(single)
        if self._recording.on and len(bucket.ids) > 1:
            self._recording.grouped([self._at[number] for number in bucket.ids])

    def _put(self, bucket: Bucket) -> None:
        self._at.update(dict.fromkeys(bucket.ids, bucket))
        self.grouping = object()
        self._lists.clear()
        self._elements.clear()


def _initialized(target: AnyTarget, number: int) -> AlreadyInitialized:
    key = target.segments.keys[target.places[number]]
    return AlreadyInitialized(f"key {key!r} is already initialized; push a new value instead")
