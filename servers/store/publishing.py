"""The versions of one store's arrays on one server: made when rounds close, and read while training goes on. Pure.

A version is made of a bucket at its round, in one pass over the bucket, before the next update. The last two whole
versions can be read. A standby makes a version when its primary has: only then has it the primary's values for sure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvstore import wire
from kvstore.errors import KeyNotInitialized, UsageError
from kvstore.lineage import UNKNOWN
from kvstore.spec import Key
from kvstore.wire.versions import WIDE, pieces
from servers.store.bucket import Bucket
from servers.store.buckets import Buckets
from servers.store.published import PublishedValues
from servers.store.recording import Recording
from servers.store.rounds import Rounds


@dataclass(slots=True)
class _Pending:
    """A version that is not whole here: ``missing`` has the segments that it lacks, with their rounds."""

    number: int
    label: str
    missing: dict[int, int]


class Publishing:
    """See the module.

    Attributes:
        lineage: of the versions.
        pending: the versions that are not whole here, oldest first. Look here before anything else: it is empty at most
            times, and always where nothing is published.
        whole: the labels of the last two whole versions, by number.
        made: how many versions have become whole here.
    """

    def __init__(self, store: int, buckets: Buckets, recording: Recording) -> None:
        self.lineage = UNKNOWN
        self.pending: list[_Pending] = []
        self.whole: dict[int, str] = {}
        self.made = 0
        self._store = store
        self._buckets = buckets
        self._recording = recording
        self._last = 0  # the number of the last version that was asked for
        self._values: dict[int, list[PublishedValues]] = {}  # by segment, of each of its pieces

    @property
    def newest(self) -> int:
        """The number of the newest whole version; 0 if there is none."""
        return max(self.whole, default=0)

    def begin(self, message: wire.Publish) -> None:
        """Make a version: now of what has reached its round, of the rest later."""
        if message.number <= self._last or self.lineage not in (UNKNOWN, message.lineage):
            raise UsageError(f"version {message.number} of store {self._store} cannot follow version {self._last}")
        new: dict[int, list[PublishedValues]] = {}
        for number in message.ids:
            bucket, place = self._buckets.find(number)
            dtype = self._published_as(number, bucket.segments.keys[place], bucket.dtype, message.rounded)
            if number not in self._values:
                new[number] = self._new(bucket.sizes[place], bucket.dtype, dtype)
        # Recorded before the versions of its buckets are, and they are as on the standby now.
        if self._recording.on:
            self._recording.note(message)
        self._values |= new
        self.lineage, self._last = message.lineage, message.number
        missing = dict(zip(message.ids, message.clocks, strict=True))
        self.pending.append(_Pending(message.number, message.label, missing))
        self.reached(self._buckets.of(message.ids))

    def reached(self, buckets: Iterable[Bucket] | None = None) -> None:
        """Make the versions that ``buckets`` have reached the rounds of; of all buckets by default.

        To be called after each update of a bucket, and before: a server that takes over may have a round of its primary
        without the version.
        """
        for bucket in self._buckets.all() if buckets is None else buckets:
            now = not isinstance(bucket.rounds, Rounds)
            for pending in list(self.pending):
                due = [
                    number
                    for number in bucket.ids
                    if number in pending.missing and (now or pending.missing[number] <= bucket.version)
                ]
                if due:
                    self._make(pending, due)
        self._settle()

    def follow(self, message: wire.VersionMade) -> None:
        """Make, as a primary has, a version of segments; those that are made already are as they should be."""
        for pending in list(self.pending):
            if pending.number == message.number:
                self._make(pending, [number for number in message.ids if number in pending.missing])
        self._settle()

    def _make(self, pending: _Pending, ids: Sequence[int]) -> None:
        if self._buckets.doubt_of(ids) is not None:  # half updated: there is no such version, and no later one either
            self.pending.remove(pending)
            return
        for number in ids:
            flat = self._buckets.value(number).reshape(-1)
            for (start, stop), values in zip(pieces(flat.numel()), self._values[number], strict=True):
                values.publish(flat[start:stop], pending.number)
            del pending.missing[number]
        if self._recording.on:
            self._recording.note(wire.VersionMade(self._store, pending.number, list(ids)))

    def _settle(self) -> None:
        while self.pending and not self.pending[0].missing:
            done = self.pending.pop(0)
            self.whole[done.number] = done.label
            self.made += 1
            for old in sorted(self.whole)[:-2]:
                del self.whole[old]

    def _published_as(self, number: int, key: Key, source: str, dtype: str | None) -> str:
        known = self._values.get(number)
        wanted = source if dtype is None or source not in WIDE else dtype
        if known is None:
            return wanted
        if known and dtype is not None and known[0].dtype != wanted:
            raise UsageError(f"key {key!r} is published as {known[0].dtype}, and cannot be published as {wanted}")
        return known[0].dtype if known else wanted

    # ---- for a new standby

    def snapshot(self) -> Iterator[wire.Message]:
        """Return the records of all versions. Of each piece only the newest is in them."""
        for number, values in self._values.items():
            for place, piece in enumerate(values):
                tensors, plain = piece.state()
                buffers: list[wire.Buffer] = [tensors[name].numpy().tobytes() for name in ("bits", "marks")]
                versions: list[int] = plain["changes"]  # type: ignore[assignment]
                newest = piece.newest or 0
                yield wire.PublishedState(self._store, number, place, piece.dtype, newest, versions, buffers)
        for number, label in sorted(self.whole.items()):
            yield wire.VersionState(self._store, self.lineage, number, label, [], [])
        for each in self.pending:
            ids, clocks = list(each.missing), list(each.missing.values())
            yield wire.VersionState(self._store, self.lineage, each.number, each.label, ids, clocks)

    def restore(self, message: wire.VersionState | wire.PublishedState) -> None:
        if isinstance(message, wire.VersionState):
            self.lineage, self._last = message.lineage, message.number
            if message.ids:
                missing = dict(zip(message.ids, message.clocks, strict=True))
                self.pending.append(_Pending(message.number, message.label, missing))
            else:
                self.whole[message.number] = message.label
            return
        bucket, place = self._buckets.find(message.id)
        made = self._values.setdefault(message.id, self._new(bucket.sizes[place], bucket.dtype, message.dtype))
        if len(message.buffers) != 2 or message.place >= len(made):
            raise ValueError(f"piece {message.place} of {len(made)}, with {len(message.buffers)} buffers")
        bits, marks = (torch.from_numpy(np.frombuffer(each, np.uint8).copy()) for each in message.buffers)
        if message.newest:
            plain = {"newest": message.newest, "changes": list(message.versions)}
            made[message.place].restore({"bits": bits, "marks": marks}, plain)

    @staticmethod
    def _new(size: int, source: str, dtype: str) -> list[PublishedValues]:
        return [PublishedValues(stop - start, source, dtype) for start, stop in pieces(size)]

    # ---- what readers get

    def pieces_of(self, ids: Sequence[int]) -> list[PublishedValues]:
        """Return what is published of segments ``ids``, in order.

        Raises:
            KeyNotInitialized: one of them is in no version.
        """
        for number in ids:
            if number not in self._values:
                key = self._buckets.segment(number).key
                raise KeyNotInitialized(f"key {key!r} is in no version that was published")
        return [values for number in ids for values in self._values[number]]

    def changes(self, values: PublishedValues, held: int, number: int) -> tuple[int, list[wire.Buffer]] | None:
        """Return the checksum of a piece in version ``number``, and what makes it of version ``held``, 0 for nothing.

        None: that version of it is gone.
        """
        newest, previous = values.newest, values.previous
        # A version has the newest values up to then: its own, unless the piece was published again since.
        at = newest if newest is None or number >= newest else previous
        if newest is None or at is None or number < at:
            return None
        total = values.checksum(at)
        changes = values.changes(min(held, newest) or None, at)
        return None if total is None or changes is None else (total, changes)

    @property
    def nbytes(self) -> int:
        """How many bytes of memory published values take."""
        return sum(each.nbytes for values in self._values.values() for each in values)
