"""What one store's primary records, so that a standby comes to the same state bit by bit. Pure.

Contributions to rounds that are open are not recorded: workers repeat them, should the primary be lost. A round is
recorded when it is closed: its sum before the optimizer steps with it, or its value where sums are assigned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from kvstore.optim.state_messages import SegmentState, pack_states
from kvstore.optim.states import StateTensors
from kvstore.rows.ids import Ids
from kvstore.rows.sums import Rows
from kvstore.transport.memory import Heap, Memory
from kvstore.values import to_buffer
from kvstore.wire import (
    ClosedRounds,
    ClosedRowRounds,
    CodecDescription,
    Drawn,
    EncodedAnswer,
    Grouped,
    Message,
    ReadBy,
    StatesState,
    pack_arrays,
)
from servers.requests.replies import described_error
from servers.store.bucket import Bucket
from servers.store.hyperparameters import UpdateHyperparameters
from servers.store.rounds import Rounds
from servers.store.row_target import RowTarget

Recorder = Callable[[Message], None]


class Recording:
    """Makes the records of one store.

    Args:
        store: its number.
        recorder: is given each record, before what it records has left the server; None if there is no standby.
        memory: for sums of rows.

    Attributes:
        on: whether there is a recorder. Ask before each call.
    """

    def __init__(self, store: int = 0, recorder: Recorder | None = None, memory: Memory | None = None) -> None:
        self._store = store
        self._memory = memory or Heap()
        self.use(recorder)

    def use(self, recorder: Recorder | None) -> None:
        """Give records to ``recorder`` from now on."""
        self._recorder = recorder
        self.on = recorder is not None

    def note(self, message: Message) -> None:
        """Record a request as it came."""
        if self._recorder is not None:
            self._recorder(message)

    def grouped(self, buckets: Sequence[Bucket]) -> None:
        """Record that ``buckets`` are new: their segments were in others."""
        self.note(grouped_record(self._store, buckets))

    def sums(
        self,
        buckets: Sequence[Bucket],
        sums: Sequence[torch.Tensor],
        scales: Sequence[float],
        hyper: UpdateHyperparameters,
        failures: Mapping[Bucket, Exception],
    ) -> None:
        """Record closed rounds with which the optimizer steps.

        Args:
            buckets: those that are updated.
            sums: the sum for each, of the bucket's dtype. It must not change while the record exists.
            scales: the factor of each sum.
            hyper: what to update with.
            failures: the buckets whose round has failed, and why.
        """
        buffers = list(map(to_buffer, sums))
        self._rounds(buckets, buffers, failures, hyper, [] if all(scale == 1 for scale in scales) else list(scales))

    def values(self, buckets: Sequence[Bucket], failures: Mapping[Bucket, Exception]) -> None:
        """Record closed rounds whose sums are the new values of ``buckets``; see ``sums``."""
        buffers = [bucket.whole() for bucket in buckets]
        self._rounds(buckets, buffers, failures, UpdateHyperparameters(), [], assigned=True)

    def row_sums(
        self,
        targets: Sequence[RowTarget],
        sums: Sequence[tuple[Ids, Rows]],
        hyper: UpdateHyperparameters,
        failures: Mapping[RowTarget, Exception],
    ) -> None:
        """Record closed rounds of tables; see ``sums``.

        Args:
            targets: those that are updated.
            sums: the ids and rows for each, which may change after this call.
            hyper: what to update with.
            failures: the tables whose round has failed, and why.
        """
        every = [*targets, *failures]
        record = ClosedRowRounds(
            self._store,
            [target.number for target in every],
            versions=[target.rounds.version for target in every],
            contributors=_contributors([target.rounds for target in every]),
            lr=hyper.lr,
            rescale=hyper.rescale,
            changes=hyper.listed(),
            failures=[[place, *described_error(error)] for place, error in enumerate(failures.values(), len(targets))],
            counts=[len(ids) for ids, _ in sums],
            buffers=pack_arrays([self._copied(array) for part in sums for array in part]),
        )
        self.note(record)

    def drawn(self, buckets: Sequence[Bucket], states: StateTensors) -> None:
        """Record the values, and the states, that a random update has made."""
        self.note(Drawn(self._store, *_segments(buckets), [bucket.whole() for bucket in buckets]))
        if states:
            self.note(states_record(self._store, states))

    def read(self, ids: Sequence[int], ranks: Sequence[int]) -> None:
        """Record that workers ``ranks`` are sent the values of segments ``ids``."""
        self.note(ReadBy(self._store, list(ids), list(ranks)))

    def encoded(self, ids: Sequence[int], back: CodecDescription) -> None:
        """Record that the values of segments ``ids`` are encoded with ``back`` now, with error feedback."""
        self.note(EncodedAnswer(self._store, list(ids), back))

    def _rounds(
        self,
        buckets: Sequence[Bucket],
        buffers: Sequence[memoryview],
        failures: Mapping[Bucket, Exception],
        hyper: UpdateHyperparameters,
        scales: list[float],
        assigned: bool = False,
    ) -> None:
        every = [*buckets, *failures]
        rounds = [bucket.rounds for bucket in every]
        record = ClosedRounds(
            self._store,
            *_segments(every),
            versions=[each.version for each in rounds],
            contributors=_contributors(rounds),
            scales=scales + [1.0] * len(failures) if scales else [],
            lr=hyper.lr,
            rescale=hyper.rescale,
            changes=hyper.listed(),
            failures=[[place, *described_error(error)] for place, error in enumerate(failures.values(), len(buckets))],
            assigned=assigned,
            buffers=buffers,
        )
        self.note(record)

    def _copied(self, array: Any) -> memoryview:
        buffer = self._memory.allocate(array.nbytes)
        np.copyto(np.frombuffer(buffer, array.dtype).reshape(array.shape), array)
        return buffer


def grouped_record(store: int, buckets: Sequence[Bucket]) -> Grouped:
    """Return a record that ``buckets`` are there, with these segments."""
    return Grouped(store, *_segments(buckets))


def states_record(store: int, states: StateTensors) -> StatesState:
    """Return a record of copies of ``states``: updates change them in place."""
    copies = [SegmentState(int(number), name, value.detach().clone()) for (number, name), value in states.items()]
    return StatesState(store, **pack_states(copies))


def _contributors(rounds: Sequence[object]) -> list[list[int]]:
    """Return who has contributed to each of ``rounds``; nothing if none of them has a quorum."""
    contributors = [list(each.contributors) for each in rounds if isinstance(each, Rounds)]
    return contributors if any(contributors) else []


def _segments(buckets: Sequence[Bucket]) -> tuple[list[int], list[int]]:
    """Return the segments of ``buckets``, one bucket after the other, and how many each has."""
    return [number for bucket in buckets for number in bucket.ids], [len(bucket.ids) for bucket in buckets]
