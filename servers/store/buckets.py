"""How one store's segments are grouped into buckets: as workers push them.

A push of a list that is several whole buckets makes one of them, if none has an open round; a push of a part of a
bucket takes it apart. Values, rounds and who waits for them are the same before and after, to the bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import torch

from kvstore.errors import AlreadyInitialized, KeyNotInitialized, UsageError
from kvstore.spec import Key, Spec
from kvstore.transport.memory import Memory
from kvstore.values import TensorRange, cut
from servers.store.bucket import Bucket, Contribution, HeldSegment, HeldSegments, Progress

MAX_SPLITS = 2  # segments that have been taken apart so often are not put together again: workers differ


class Buckets:
    """The buckets of one store.

    Args:
        rounds: makes those of a new segment.
        memory: where values live.
    """

    def __init__(self, rounds: Callable[[], Progress], memory: Memory) -> None:
        self._rounds = rounds
        self._memory = memory
        self._at: dict[int, Bucket] = {}  # by segment
        self._lists: dict[tuple[int, ...], list[Bucket]] = {}

    def all(self) -> list[Bucket]:
        """Return all buckets, each once."""
        return list(dict.fromkeys(self._at.values()))

    def add(self, ids: Sequence[int], keys: Sequence[Key], specs: Sequence[Spec], runs: Sequence[TensorRange]) -> None:
        """Take new segments of one dtype, and their first values, back to back in ``runs``."""
        if not ids:
            return
        if not self._at.keys().isdisjoint(ids):
            known = next(number for number in ids if number in self._at)
            bucket = self._at[known]
            same = bucket.ids == tuple(ids) and list(bucket.segments.specs) == list(specs)
            if not same or not bucket.rounds.untouched:
                raise AlreadyInitialized(f"key {self.segment(known).key!r} is initialised already")
            bucket.assign([runs])  # an earlier init was interrupted before anybody knew of it
            return
        segments = HeldSegments(ids, keys, specs, [0] * len(ids))
        bucket = Bucket(segments, specs[0].dtype, self._rounds(), self._memory)
        bucket.load(runs)
        self._put(bucket)

    def segment(self, number: int) -> HeldSegment:
        """Return segment ``number``."""
        bucket, place = self.find(number)
        return bucket.segments.segment(place)

    def value(self, number: int) -> torch.Tensor:
        """Return the value of segment ``number`` where it lies, in its shape."""
        bucket, place = self.find(number)
        start = bucket.starts[place]
        return bucket.value[start : start + bucket.sizes[place]].view(bucket.segments.specs[place].shape)

    def find(self, number: int) -> tuple[Bucket, int]:
        """Return the bucket of segment ``number``, and its place therein."""
        bucket = self.holding(number)
        return bucket, bucket.places[number]

    def holding(self, number: int) -> Bucket:
        """Return the bucket of segment ``number``."""
        try:
            return self._at[number]
        except KeyError:
            raise KeyNotInitialized(f"segment {number} has no value on this server; call init first") from None

    def of(self, ids: Sequence[int]) -> list[Bucket]:
        """Return the buckets that hold segments ``ids``, each once."""
        whole = self._lists.get(tuple(ids))
        if whole is not None:
            return whole
        return list(dict.fromkeys(map(self.holding, ids)))

    def segment_ranges(self, ids: Sequence[int]) -> list[tuple[Bucket, int, int]]:
        """Return where segments ``ids`` are: ranges of places of buckets, in order."""
        whole = self._lists.get(tuple(ids))
        if whole is not None:
            return [(bucket, 0, len(bucket.ids)) for bucket in whole]
        runs: list[tuple[Bucket, int, int]] = []
        for number in ids:
            bucket, place = self.find(number)
            if runs and runs[-1][0] is bucket and runs[-1][2] == place:
                runs[-1] = (bucket, runs[-1][1], place + 1)
            else:
                runs.append((bucket, place, place + 1))
        return runs

    def element_ranges(self, ids: Sequence[int]) -> list[tuple[Bucket, int, int]]:
        """Return where the values of segments ``ids`` are: ranges of elements of buckets, in order."""
        return [
            (bucket, bucket.starts[first], bucket.starts[stop - 1] + bucket.sizes[stop - 1])
            for bucket, first, stop in self.segment_ranges(ids)
        ]

    def versions(self, ids: Sequence[int]) -> list[int]:
        """Return how many rounds of each of segments ``ids`` are over."""
        return [self.holding(number).rounds.version for number in ids]

    def pushed(self, ids: Sequence[int], clocks: Sequence[int]) -> list[Bucket]:
        """Return the buckets that ``ids`` are, one after the other, each with one clock; makes them so."""
        listed = tuple(ids)
        if clocks.count(clocks[0] if clocks else 0) < len(clocks):
            return self._divide(listed, clocks)
        found = self._lists.get(listed)
        if found is None:
            found = self._divide(listed, clocks)
        if len(found) > 1 and self._may_merge(found):
            found = [self._merge(found)]
        self._lists[listed] = found
        return found

    def _divide(self, ids: tuple[int, ...], clocks: Sequence[int]) -> list[Bucket]:
        for number in ids:
            self.holding(number)
        found: list[Bucket] = []
        at = 0
        while at < len(ids):
            bucket = self._at[ids[at]]
            end = at + len(bucket.ids)
            if ids[at:end] != bucket.ids or len(set(clocks[at:end])) > 1:
                self._split(bucket)
                bucket = self._at[ids[at]]
            found.append(bucket)
            at += len(bucket.ids)
        if len({bucket.dtype for bucket in found}) > 1:
            raise UsageError("segments of several dtypes in one message")
        return found

    def apart(self, clocks: Mapping[int, int]) -> list[Bucket]:
        """Return all buckets, each once, whose segments have one clock among these, or none; makes them so."""
        for bucket in self.all():
            if len({clocks.get(number) for number in bucket.ids}) > 1:
                self._split(bucket)
        return self.all()

    def _may_merge(self, buckets: Sequence[Bucket]) -> bool:
        state = buckets[0].rounds.state
        return all(b.idle and b.rounds.state == state and b.segments.splits[0] < MAX_SPLITS for b in buckets)

    def _merge(self, buckets: Sequence[Bucket]) -> Bucket:
        columns = zip(*(bucket.segments for bucket in buckets), strict=True)
        segments = HeldSegments(*(list(itertools.chain(*parts)) for parts in columns))
        merged = Bucket(segments, buckets[0].dtype, buckets[0].rounds.copy(), self._memory)
        torch.cat([bucket.value for bucket in buckets], out=merged.value)
        for rank in set.intersection(*(set(bucket.read_by) for bucket in buckets)):
            merged.read_by[rank] = torch.cat([bucket.read_by[rank] for bucket in buckets])
        self._put(merged)
        return merged

    def _split(self, bucket: Bucket) -> None:
        waiting = [(*entry, set(entry[1].request.ids)) for entry in bucket.parked]
        for place, number in enumerate(bucket.ids):
            segment = bucket.segments.segment(place)
            start = bucket.starts[place]
            stop = start + bucket.sizes[place]
            segments = HeldSegments([number], [segment.key], [segment.spec], [segment.splits + 1])
            single = Bucket(segments, bucket.dtype, bucket.rounds.copy(), self._memory)
            single.load([TensorRange(0, bucket.value[start:stop])])
            for clock, rank, item in bucket.rounds.open():
                part = Contribution(item.node, item.clock, cut(item.runs, start, stop), item.hyper)
                single.rounds.contribute(rank, clock, part)
            single.read_by = {rank: values[start:stop].clone() for rank, values in bucket.read_by.items()}
            for clock, parked, wanted in waiting:
                if number in wanted:
                    single.parked.append((clock, parked))
                    parked.left += 1
            self._put(single)
        for _, parked, _ in waiting:
            parked.left -= 1

    def _put(self, bucket: Bucket) -> None:
        self._at.update(dict.fromkeys(bucket.ids, bucket))
        self._lists.clear()
