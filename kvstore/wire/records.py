"""What a primary records of its state, for its standby: the messages that travel inside a ``Record``.

What one worker's request changes is recorded as that request. The rest is here: rounds that have been closed, what
answering has changed, and, for a new standby, the whole state. All of it is applied in the order of the records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from kvstore.job.settings import MAX_NODES
from kvstore.lineage import UNKNOWN
from kvstore.rule import AGGREGATE, LATE
from kvstore.wire import fields as f
from kvstore.wire.arrays import (
    Aggregation,
    Changes,
    CodecDescription,
    Late,
    Mode,
    Names,
    Owners,
    Quorum,
    SegmentCounts,
    Staleness,
)
from kvstore.wire.frames import Buffer, message
from kvstore.wire.messages import (
    Clocks,
    Dtypes,
    Ids,
    Keys,
    Kinds,
    Lineage,
    Message,
    NodeField,
    Number,
    Ranks,
    Seq,
    Shapes,
    Store,
    require_known,
    same_length,
)
from kvstore.wire.rows import Columns, Count, Counts, SegmentId, table

RankClocks = Annotated[
    list[list[int]], f.list_of(f.tuple_of(f.integer(0, MAX_NODES), f.integer(0, 2**62 - 1)), MAX_NODES + 1)
]  # ranks of workers, and a clock of each
Failures = Annotated[
    list[list[Any]], f.list_of(f.tuple_of(f.integer(), f.text(64), f.text()))
]  # a number, and the error that belongs to it: a class of ``kvstore.errors``, and its text
Factors = Annotated[list[float], f.list_of(f.number)]
Members = Annotated[list[list[int]], f.list_of(f.rising(0, MAX_NODES))]  # ranks of workers, for each bucket


@message(60)
@dataclass(frozen=True)
class Record(Message):
    """From a primary: the ``number``-th change of its state. The buffers are the frames of a message that says which.

    Attributes:
        epoch: of the view that the primary serves in.
        number: 1 for the first record to this standby; no number is left out.
    """

    epoch: Seq
    number: Annotated[int, f.integer(1)]
    buffers: Sequence[Buffer] = field(repr=False, default=())


@message(61)
@dataclass(frozen=True)
class Stored(Message):
    """From a standby: I have every record up to ``number``, and shall apply them even if you are lost."""

    epoch: Seq
    number: Seq


@message(70)
@dataclass(frozen=True)
class Grouped(Message):
    """These are buckets from now on: the first ``sizes[0]`` of segments ``ids``, the next ``sizes[1]``, and so on."""

    store: Store
    ids: Ids
    sizes: SegmentCounts


@message(71)
@dataclass(frozen=True)
class ClosedRounds(Message):
    """The next round of each of these buckets is over; see ``Grouped`` for ``ids`` and ``sizes``.

    Attributes:
        versions: the number of each bucket's round.
        contributors: with a quorum, who has contributed to each; else empty.
        scales: the factor of each bucket's sum before the optimizer's own; empty if all are 1.
        lr, rescale, changes: what the optimizer updates with; see ``Push``.
        failures: the places of the buckets that the round has left unchanged, and why.
        assigned: whether the buffers are new values; else they are sums to update with.
        kept: whether the receiver may keep the rounds, since ``Updated`` will say what they have made. If the sender is
            lost before that, it makes the updates itself.
        buffers: of each bucket that did not fail, all elements; sums of half precision are in float32.
    """

    store: Store
    ids: Ids
    sizes: SegmentCounts
    versions: Clocks
    contributors: Members
    scales: Factors
    lr: Number
    rescale: Number
    changes: Changes
    failures: Failures
    assigned: Annotated[bool, f.flag]
    kept: Annotated[bool, f.flag] = False
    buffers: Sequence[Buffer] = field(repr=False, default=())

    def __post_init__(self) -> None:
        same_length(self.sizes, self.versions)
        if self.contributors:
            same_length(self.sizes, self.contributors)
        if self.scales:
            same_length(self.sizes, self.scales)


@message(72)
@dataclass(frozen=True)
class Updated(Message):
    """What an optimizer has made of these buckets; see ``Grouped``.

    The receiver may have kept their last rounds, or could not make the same updates, because they are random.

    Attributes:
        versions: how many rounds of each bucket are over with that; where every push is an update, how often its
            values have changed.
        owners, counts: of each tensor of the optimizer's states, the segments that it belongs to, and their number.
            Several segments share a number, or have their elements back to back in a flat tensor.
        names, shapes, dtypes: of these tensors.
        buffers: of each bucket all elements, and then the states.
    """

    store: Store
    ids: Ids
    sizes: SegmentCounts
    versions: Clocks
    owners: Owners
    counts: SegmentCounts
    names: Names
    shapes: Shapes
    dtypes: Dtypes
    buffers: Sequence[Buffer] = field(repr=False, default=())

    def __post_init__(self) -> None:
        same_length(self.sizes, self.versions)
        same_length(self.counts, self.names, self.shapes, self.dtypes)


@message(73)
@dataclass(frozen=True)
class ReadBy(Message):
    """Workers ``ranks`` have been sent the values of segments ``ids``, and delay compensation remembers that."""

    store: Store
    ids: Ids
    ranks: Ranks


@message(74)
@dataclass(frozen=True)
class EncodedAnswer(Message):
    """The values of segments ``ids`` have been encoded with ``back``, which has changed their residuals."""

    store: Store
    ids: Ids
    back: CodecDescription


@message(76)
@dataclass(frozen=True)
class InDoubt(Message):
    """The values of segments ``ids`` may be half updated, and are served no more: ``why`` in words."""

    store: Store
    ids: Ids
    why: Annotated[str, f.text()]


# ---- the whole state, for a new standby


@message(80)
@dataclass(frozen=True)
class StoreState(Message):
    """A store is open: its rule and lineage, see ``Open``, and the ranks that have opened and closed it."""

    store: Store
    opened_by: Ranks
    closed_by: Ranks
    mode: Mode
    staleness: Staleness = None
    quorum: Quorum = None
    late: Late = LATE[0]
    compensation: Annotated[float, f.number] = 0.0
    finite: Annotated[bool, f.flag] = False
    aggregate: Aggregation = AGGREGATE[0]
    lineage: Lineage = UNKNOWN


@message(81)
@dataclass(frozen=True)
class OptimizerCalls(Message):
    """Worker 0's calls of ``set_optimizer`` so far: ``versions``, and in the buffers, one frame each, the requests.

    Attributes:
        failures: the versions that have failed, and why. The last one that has not is that of the optimizer.
        lr, rescale, changes: what the last update was made with, which the next may go on with; see ``Push``.
    """

    store: Store
    versions: Clocks
    failures: Failures
    lr: Number
    rescale: Number
    changes: Changes
    buffers: Sequence[Buffer] = field(repr=False, default=())


@message(82)
@dataclass(frozen=True)
class BucketState(Message):
    """A bucket: its segments, as in ``Init``, and its progress.

    Attributes:
        splits: how often each segment has been taken out of a bucket.
        version: how many rounds are over; where every push is an update, how often the values have changed.
        pushed: how often each worker has pushed, where every push is an update; with a quorum, each worker's last push
            that counts.
        failures: the last rounds that have failed, and why.
        read_by: the workers whose last read is kept, for delay compensation.
        buffers: the value, and what each of ``read_by`` has read.
    """

    store: Store
    ids: Ids
    keys: Keys
    kinds: Kinds
    shapes: Shapes
    dtype: Annotated[str, f.dtype]
    splits: Annotated[list[int], f.integers()]
    version: Seq
    pushed: RankClocks
    failures: Failures
    read_by: Ranks
    buffers: Sequence[Buffer] = field(repr=False, default=())

    def __post_init__(self) -> None:
        same_length(self.ids, self.keys, self.kinds, self.splits)
        require_known(self.kinds, self.shapes)


@message(83)
@dataclass(frozen=True)
class StatesState(Message):
    """The optimizer's states of some segments; see ``OptimizerStates``."""

    store: Store
    ids: Owners
    names: Names
    shapes: Shapes
    dtypes: Dtypes
    buffers: Sequence[Buffer] = field(repr=False, default=())

    def __post_init__(self) -> None:
        same_length(self.ids, self.names, self.shapes, self.dtypes)


@message(84)
@dataclass(frozen=True)
class EncoderState(Message):
    """What is kept for answers that are compressed with ``back``.

    Attributes:
        residuals: the segments with a residual.
        steps: how often each has been encoded.
        encoded: the segments whose last encoding is kept.
        versions: the round of each.
        names, shapes, dtypes: of the tensors in the buffers: "residual.0" is of the first of ``residuals``, and there
            may be a "velocity" and a "basis" of each; "payload.0" is that of the first of ``encoded``.
    """

    store: Store
    back: CodecDescription
    residuals: Owners
    steps: Clocks
    encoded: Owners
    versions: Clocks
    names: Names
    shapes: Shapes
    dtypes: Dtypes
    buffers: Sequence[Buffer] = field(repr=False, default=())

    def __post_init__(self) -> None:
        same_length(self.residuals, self.steps)
        same_length(self.encoded, self.versions)
        same_length(self.names, self.shapes, self.dtypes)


@message(85)
@dataclass(frozen=True)
class LedgerPage(Message):
    """The requests of one member that it may repeat, and how they are answered.

    Attributes:
        done: see ``Sender``.
        seqs: the numbers of requests that have been answered.
        buffers: for each, one frame: the answer, or a ``Pull`` where the values of now are the answer.
    """

    node: NodeField
    done: Seq
    seqs: Clocks
    buffers: Sequence[Buffer] = field(repr=False, default=())


# ---- tables


@message(75)
@dataclass(frozen=True)
class ClosedRowRounds(Message):
    """The next round of each of these tables' segments is over.

    Attributes:
        versions: the number of each segment's round.
        contributors: with a quorum, who has contributed to each; else empty.
        lr, rescale, changes: what the optimizer updates with; see ``Push``.
        failures: the places of the segments that the round has left unchanged, and why.
        counts: how many rows each segment that did not fail is updated with.
        together: whether the rows of all these segments, which are of one width and dtype, are one array.
        buffers: the ids of all these segments (int64; those of a segment rise), and the sums of the rows: one array, or
            one for each segment; see ``arrays``.
    """

    store: Store
    ids: Ids
    versions: Clocks
    contributors: Members
    lr: Number
    rescale: Number
    changes: Changes
    failures: Failures
    counts: Counts
    together: Annotated[bool, f.flag]
    buffers: Sequence[Buffer] = field(repr=False, default=())

    def __post_init__(self) -> None:
        same_length(self.ids, self.versions)
        if self.contributors:
            same_length(self.ids, self.contributors)


@message(86)
@dataclass(frozen=True)
class StripeState(Message):
    """A table's segment, as in ``InitTables``, without its rows.

    Attributes:
        version: how many rounds are over; 0 where every push is an update.
        updates: how many updates its rows have had.
        pushed, failures: see ``BucketState``.
        changed: the last rounds whose changed rows are known.
        counts: how many rows each of them has changed.
        buffers: for each of ``changed``, the ids of these rows (int64).
    """

    store: Store
    id: SegmentId
    key: Annotated[Any, f.key]
    table: Annotated[list[Any], table]
    stripe: Annotated[int, f.integer()]
    stripes: Annotated[int, f.integer(1)]
    version: Seq
    updates: Seq
    pushed: RankClocks
    failures: Failures
    changed: Clocks
    counts: Counts
    buffers: Sequence[Buffer] = field(repr=False, default=())

    def __post_init__(self) -> None:
        same_length(self.changed, self.counts)


@message(87)
@dataclass(frozen=True)
class TablePage(Message):
    """Rows of a table's segment, with all that belongs to each; see ``PutRows``.

    Attributes:
        names, dtypes, columns: of what each row has beside its values.
        buffers: the ids (int64), the rows, and each of ``names``.
    """

    store: Store
    id: SegmentId
    count: Count
    names: Names
    dtypes: Dtypes
    columns: Columns
    buffers: Sequence[Buffer] = field(repr=False, default=())

    def __post_init__(self) -> None:
        same_length(self.names, self.dtypes, self.columns)


@message(88)
@dataclass(frozen=True)
class TableRest(Message):
    """All pages of a table's segment have come. This is what decides, beside its rows, how it goes on.

    Attributes:
        names: of arrays of int64, by ``kvstore.rows.row_table.RowTable.rest``.
        buffers: each of ``names``.
    """

    store: Store
    id: SegmentId
    names: Names
    buffers: Sequence[Buffer] = field(repr=False, default=())
