"""The records of one store's primary, which bring a standby to the same state bit by bit. Pure.

Contributions to rounds that are open are not recorded: workers repeat them, should the primary be lost. A round is
recorded when it is closed: its sum before the optimizer steps with it, or its value where sums are assigned.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch

from kvstore import wire
from kvstore.optim.states import SegmentState, StateParts, StateTensors, pack_parts, pack_states
from kvstore.rows.ids import Ids
from kvstore.rows.layout import bytes_of
from kvstore.rows.sums import Rows
from kvstore.transport.memory import Heap, Memory
from kvstore.values import RowRange, from_buffer, spec_of, to_buffer
from servers.requests.replies import described_error
from servers.store.array_rows import described
from servers.store.bucket import Bucket
from servers.store.hyperparameters import UpdateHyperparameters
from servers.store.rounds import Rounds
from servers.store.target import AnyTarget


class Recorder(Protocol):
    """Takes records, each before the change that it describes has left the server."""

    @property
    def shares(self) -> bool:
        """Whether the standby reads this process's memory: then large frames cost nothing."""
        ...

    def note(self, message: wire.Message) -> None: ...


class Recording:
    """Makes the records of one store. Ask ``on``, which is whether there is a recorder, before each call.

    ``memory`` is for sums of rows, and copies of states.
    """

    def __init__(self, store: int = 0, recorder: Recorder | None = None, memory: Memory | None = None) -> None:
        self.store = store
        self._memory = memory or Heap()
        self.use(recorder)

    def use(self, recorder: Recorder | None) -> None:
        self._recorder = recorder
        self.on = recorder is not None

    @property
    def shares(self) -> bool:
        return self._recorder is not None and self._recorder.shares

    def note(self, message: wire.Message) -> None:
        if self._recorder is not None:
            self._recorder.note(message)

    def grouped(self, buckets: Sequence[Bucket]) -> None:
        """Record that ``buckets`` are new: their segments were in others."""
        self.note(grouped_record(self.store, buckets))

    def sums(
        self,
        buckets: Sequence[Bucket],
        sums: Sequence[torch.Tensor],
        scales: Sequence[float],
        hyper: UpdateHyperparameters,
        failures: Mapping[Bucket, Exception],
        kept: bool = False,
    ) -> None:
        """Record closed rounds with which the optimizer steps.

        Args:
            sums: the sum for each bucket, in the dtype of its sums. It must not change while the record exists.
            failures: the buckets whose round has failed, and why.
            kept: whether ``updated`` will follow, now or later.
        """
        buffers = list(map(to_buffer, sums))
        listed = [] if all(scale == 1 for scale in scales) else list(scales)
        self._rounds(buckets, buffers, failures, hyper, listed, kept=kept)

    def rows(self, bucket: Bucket, sums: Sequence[RowRange], hyper: UpdateHyperparameters) -> None:
        """Record a closed round of one bucket whose sum has some rows only; see ``sums``."""
        runs, buffers = described(sums, bucket.sizes)
        self._rounds([bucket], buffers, {}, hyper, [], runs=runs)

    def values(self, buckets: Sequence[Bucket], failures: Mapping[Bucket, Exception]) -> None:
        """Record closed rounds whose sums are the new values of ``buckets``; see ``sums``."""
        buffers = [bucket.whole() for bucket in buckets]
        self._rounds(buckets, buffers, failures, UpdateHyperparameters(), [], assigned=True)

    def row_sums(
        self,
        targets: Sequence[AnyTarget],
        sums: Sequence[tuple[Ids, Rows]],
        hyper: UpdateHyperparameters,
        failures: Mapping[Any, Exception],
        together: Rows | None = None,
    ) -> None:
        """Record closed rounds of tables; see ``sums``.

        ``together`` are the rows of all ``sums``, if they are one array.
        """
        rows = [rows for _, rows in sums] if together is None else [together]
        every = [*targets, *failures]
        record = wire.ClosedRowRounds(
            self.store,
            [target.ids[0] for target in every],
            versions=[target.rounds.version for target in every],
            contributors=_contributors([target.rounds for target in every]),
            lr=hyper.lr,
            rescale=hyper.rescale,
            changes=hyper.listed(),
            failures=[[place, *described_error(error)] for place, error in enumerate(failures.values(), len(targets))],
            counts=[len(ids) for ids, _ in sums],
            together=together is not None,
            buffers=wire.pack_arrays(list(map(bytes_of, [self._ids([ids for ids, _ in sums]), *rows]))),
        )
        self.note(record)

    def room(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Rows:
        """Return memory for sums of rows that are to be recorded, from which they can be sent."""
        nbytes = math.prod(shape) * dtype.itemsize
        return np.frombuffer(self._memory.allocate(nbytes), dtype).reshape(shape) if nbytes else np.empty(shape, dtype)

    def updated(self, buckets: Sequence[Bucket], states: StateParts) -> None:
        """Record the result of an update. The ``states`` are copied, for updates change them in place."""
        described, frames = pack_parts(self._copied(states))
        versions = [bucket.version for bucket in buckets]
        values = [bucket.whole() for bucket in buckets]
        self.note(
            wire.Updated(self.store, *_segments(buckets), versions=versions, **described, buffers=[*values, *frames])
        )

    def read(self, ids: Sequence[int], ranks: Sequence[int]) -> None:
        """Record that workers ``ranks`` are sent the values of segments ``ids``."""
        self.note(wire.ReadBy(self.store, list(ids), list(ranks)))

    def encoded(self, ids: Sequence[int], back: wire.CodecDescription) -> None:
        """Record that the values of segments ``ids`` are encoded with ``back`` now, with error feedback."""
        self.note(wire.EncodedAnswer(self.store, list(ids), back))

    def doubt(self, ids: Collection[int], error: Exception) -> None:
        """Record that segments ``ids`` are served no more, because of ``error``."""
        self.note(in_doubt_record(self.store, ids, error))

    def _rounds(
        self,
        buckets: Sequence[Bucket],
        buffers: Sequence[wire.Buffer],
        failures: Mapping[Bucket, Exception],
        hyper: UpdateHyperparameters,
        scales: list[float],
        assigned: bool = False,
        kept: bool = False,
        runs: Sequence[list[int]] = (),
    ) -> None:
        every = [*buckets, *failures]
        rounds = [bucket.rounds for bucket in every]
        record = wire.ClosedRounds(
            self.store,
            *_segments(every),
            versions=[each.version for each in rounds],
            contributors=_contributors(rounds),
            scales=scales + [1.0] * len(failures) if scales else [],
            lr=hyper.lr,
            rescale=hyper.rescale,
            changes=hyper.listed(),
            failures=[[place, *described_error(error)] for place, error in enumerate(failures.values(), len(buckets))],
            assigned=assigned,
            kept=kept,
            runs=list(runs),
            buffers=buffers,
        )
        self.note(record)

    def _copied(self, states: StateParts) -> Iterator[tuple[list[int], str, torch.Tensor]]:
        for numbers, name, value in states:
            copy = from_buffer(self._memory.allocate(value.nbytes), spec_of(value).dtype).view(value.shape)
            copy.copy_(value.detach())
            yield [int(number) for number in numbers], name, copy

    def _ids(self, parts: Sequence[Ids]) -> Ids:
        """Return a copy of all ``parts``, which may lie in a message."""
        whole = self.room((sum(map(len, parts)),), np.dtype(np.int64))
        return np.concatenate(parts, out=whole) if parts else whole


ROUNDS = 4  # whose sums are kept at most: with more the copy of the states costs hardly less
LEAST_BYTES = 64 << 10  # of the sums of a round: less is updated in no time, and may not go by reference
MOST_BYTES = 256 << 20  # of all sums of a store that are kept


def interval(random: bool, shares: bool, round_bytes: int, store_bytes: int) -> int:
    """Return after how many rounds of arrays a standby is handed them; 0 if it makes their updates itself.

    ``random``: nobody else could make the same updates. ``shares``: the standby reads this server's memory. The bytes
    are those of the sums of the arrays, and of all arrays of their store.
    """
    if random:
        return 1
    rounds = min(ROUNDS, MOST_BYTES // max(1, store_bytes))
    return rounds if shares and rounds > 1 and round_bytes >= LEAST_BYTES else 0


class HandOver:
    """Counts the rounds of a store's buckets since the standby was last handed what they have made.

    A standby that reads this server's memory is handed the values and states of arrays every few rounds. That costs a
    copy of the states, and the values cost nothing. Until then it keeps the sums of the rounds, with which it could
    make their updates if it had to take over.
    """

    def __init__(self) -> None:
        self._rounds: WeakKeyDictionary[Bucket, int] = WeakKeyDictionary()
        self._failed = False

    def keeps(self, buckets: Sequence[Bucket], every: int) -> bool:
        """Note a round of ``buckets``; return whether the standby may keep its sums until it is handed the buckets.

        ``every``: after how many rounds that is; see ``interval``.
        """
        # A standby learns that an update has failed by making it. So it makes all that it has kept with the next round.
        if not every or self._failed:
            self._failed = False
            return False
        for bucket in buckets:
            self._rounds[bucket] = self._rounds.get(bucket, 0) + 1
        return True

    def due(self, buckets: Sequence[Bucket], every: int) -> bool:
        if not every or max(self._rounds.get(bucket, 0) for bucket in buckets) < every:
            return False
        for bucket in buckets:
            self._rounds[bucket] = 0
        return True

    def fail(self) -> None:
        self._failed = True


def grouped_record(store: int, buckets: Sequence[Bucket]) -> wire.Grouped:
    return wire.Grouped(store, *_segments(buckets))


def in_doubt_record(store: int, ids: Collection[int], error: Exception) -> wire.InDoubt:
    """Return the record of ``Recording.doubt``."""
    return wire.InDoubt(store, list(ids), str(error)[: wire.MAX_REASON])


def states_record(store: int, states: StateTensors) -> wire.StatesState:
    """Return a record of copies of ``states``: updates change them in place."""
    copies = [SegmentState(int(number), name, value.detach().clone()) for (number, name), value in states.items()]
    return wire.StatesState(store, **pack_states(copies))


def _contributors(rounds: Sequence[object]) -> list[list[int]]:
    """Return the contributors of each of ``rounds``; nothing if none of them has a quorum."""
    contributors = [list(each.contributors) for each in rounds if isinstance(each, Rounds)]
    return contributors if any(contributors) else []


def _segments(buckets: Sequence[Bucket]) -> tuple[list[int], list[int]]:
    """Return the segments of ``buckets``, one bucket after the other, and how many each has."""
    return [number for bucket in buckets for number in bucket.ids], [len(bucket.ids) for bucket in buckets]
