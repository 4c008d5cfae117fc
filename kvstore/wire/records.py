"""What a primary records of its state, for its standby: the messages that travel inside a ``Record``.

What one worker's request changes is recorded as that request. The rest is here: rounds that have been closed, what
answering has changed, and, for a new standby, the whole state. All of it is applied in the order of the records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import Annotated, Any

from kvstore.job.settings import MAX_NODES
from kvstore.lineage import UNKNOWN
from kvstore.rule import AGGREGATE, LATE
from kvstore.wire import fields as f
from kvstore.wire.arrays import require_runs
from kvstore.wire.coding import Buffer, message
from kvstore.wire.message import (
    Message,
    NodeField,
    require_known,
)
from kvstore.wire.rows import (
    table,
)

RankClocks = Annotated[
    list[list[int]], f.list_of(f.tuple_of(f.integer(0, MAX_NODES), f.integer(0, 2**62 - 1)), MAX_NODES + 1)
]  # ranks of workers, and a clock of each
Failures = Annotated[
    list[list[Any]], f.list_of(f.tuple_of(f.integer(), f.text(64), f.text()))
]  # a number, and the error that belongs to it: a class of ``kvstore.errors``, and its text
Factors = Annotated[list[float], f.list_of(f.number)]
Members = Annotated[list[list[int]], f.list_of(f.rising(0, MAX_NODES))]  # ranks of workers, for each bucket


@message(60)
class Record(Message):
    """From a primary: the ``number``-th change of its state. The buffers are the frames of the message that says it."""

    epoch: f.Seq  # of the view that the primary serves in
    number: Annotated[int, f.integer(1)]  # 1 for the first record to this standby; no number is left out
    buffers: Sequence[Buffer] = field(repr=False, default=())


@message(61)
class Stored(Message):
    """From a standby: I have every record up to ``number``, and shall apply them even if you are lost."""

    epoch: f.Seq
    number: f.Seq


@message(70)
class Grouped(Message):
    """These are buckets from now on: the first ``sizes[0]`` of segments ``ids``, the next ``sizes[1]``, and so on."""

    store: f.Store
    ids: f.Ids
    sizes: f.SegmentCounts


@message(71)
class ClosedRounds(Message):
    """The next round of each of these buckets is over; see ``Grouped`` for ``ids`` and ``sizes``."""

    store: f.Store
    ids: f.Ids
    sizes: f.SegmentCounts
    versions: f.Clocks  # the number of each bucket's round
    contributors: Members  # with a quorum, who has contributed to each; else empty
    scales: Factors  # the factor of each bucket's sum before the optimizer's own; empty if all are 1
    lr: f.Number  # lr, rescale, changes: what the optimizer updates with; see ``Push``
    rescale: f.Number
    changes: f.Changes
    failures: Failures  # the places of the buckets that the round has left unchanged, and why
    assigned: Annotated[bool, f.flag]  # whether the buffers are new values; else they are sums to update with
    # whether the receiver may keep the rounds, since ``Updated`` will say what they have made. If the sender is lost
    # before that, it makes the updates itself.
    kept: Annotated[bool, f.flag] = False
    runs: f.RowRuns = field(default_factory=list)  # of one bucket, whose sum has some rows only; see ``Push.runs``
    # of each bucket that did not fail, all elements, or its rows; sums of half precision are in float32
    buffers: Sequence[Buffer] = field(repr=False, default=())

    def __post_init__(self) -> None:
        f.same_length(self.sizes, self.versions)
        if self.contributors:
            f.same_length(self.sizes, self.contributors)
        if self.scales:
            f.same_length(self.sizes, self.scales)
        if self.runs:
            require_runs(self.runs, len(self.ids))


@message(72)
class Updated(Message):
    """What an optimizer has made of these buckets; see ``Grouped``.

    The receiver may have kept their last rounds, or could not make the same updates, because they are random.
    """

    store: f.Store
    ids: f.Ids
    sizes: f.SegmentCounts
    # how many rounds of each bucket are over with that; where every push is an update, how often its values have
    # changed
    versions: f.Clocks
    # owners, counts: of each tensor of the optimizer's states, the segments that it belongs to, and their number.
    # Several segments share a number, or have their elements back to back in a flat tensor.
    owners: f.Owners
    counts: f.SegmentCounts
    names: f.Names  # names, shapes, dtypes: of these tensors
    shapes: f.Shapes
    dtypes: f.Dtypes
    buffers: Sequence[Buffer] = field(repr=False, default=())  # of each bucket all elements, and then the states

    def __post_init__(self) -> None:
        f.same_length(self.sizes, self.versions)
        f.same_length(self.counts, self.names, self.shapes, self.dtypes)


@message(73)
class ReadBy(Message):
    """Workers ``ranks`` have been sent the values of segments ``ids``, and delay compensation remembers that."""

    store: f.Store
    ids: f.Ids
    ranks: f.Ranks


@message(74)
class EncodedAnswer(Message):
    """The values of segments ``ids`` have been encoded with ``back``, which has changed their residuals."""

    store: f.Store
    ids: f.Ids
    back: f.CodecDescription


@message(76)
class InDoubt(Message):
    """The values of segments ``ids`` may be half updated, and are served no more: ``why`` in words."""

    store: f.Store
    ids: f.Ids
    why: Annotated[str, f.text()]


# ---- the whole state, for a new standby


@message(80)
class StoreState(Message):
    """A store is open: its rule and lineage, see ``Open``, and the ranks that have opened and closed it."""

    store: f.Store
    opened_by: f.Ranks
    closed_by: f.Ranks
    mode: f.Mode
    staleness: f.Staleness = None
    quorum: f.Quorum = None
    late: f.Late = LATE[0]
    grace: Annotated[float, f.number] = 0.0
    compensation: Annotated[float, f.number] = 0.0
    finite: Annotated[bool, f.flag] = False
    aggregate: f.Aggregation = AGGREGATE[0]
    lineage: f.Lineage = UNKNOWN


@message(81)
class OptimizerCalls(Message):
    """Worker 0's calls of ``set_optimizer`` so far: ``versions``, and in the buffers, one frame each, the requests."""

    store: f.Store
    versions: f.Clocks
    failures: Failures  # the versions that have failed, and why. The last one that has not is that of the optimizer.
    lr: (
        f.Number
    )  # lr, rescale, changes: what the last update was made with, which the next may go on with; see ``Push``
    rescale: f.Number
    changes: f.Changes
    buffers: Sequence[Buffer] = field(repr=False, default=())


@message(82)
class BucketState(Message):
    """A bucket: its segments, as in ``Init``, and its progress."""

    store: f.Store
    ids: f.Ids
    keys: f.Keys
    kinds: f.Kinds
    shapes: f.Shapes
    dtype: Annotated[str, f.dtype]
    splits: Annotated[list[int], f.integers()]  # how often each segment has been taken out of a bucket
    version: f.Seq  # how many rounds are over; where every push is an update, how often the values have changed
    # how often each worker has pushed, where every push is an update; with a quorum, each worker's last push that
    # counts
    pushed: RankClocks
    failures: Failures  # the last rounds that have failed, and why
    read_by: f.Ranks  # the workers whose last read is kept, for delay compensation
    buffers: Sequence[Buffer] = field(repr=False, default=())  # the value, and what each of ``read_by`` has read

    def __post_init__(self) -> None:
        f.same_length(self.ids, self.keys, self.kinds, self.splits)
        require_known(self.kinds, self.shapes)


@message(83, parallel=("ids", "names", "shapes", "dtypes"))
class StatesState(Message):
    """The optimizer's states of some segments; see ``OptimizerStates``."""

    store: f.Store
    ids: f.Owners
    names: f.Names
    shapes: f.Shapes
    dtypes: f.Dtypes
    buffers: Sequence[Buffer] = field(repr=False, default=())


@message(84)
class EncoderState(Message):
    """What is kept for answers that are compressed with ``back``."""

    store: f.Store
    back: f.CodecDescription
    residuals: f.Owners  # the segments with a residual
    steps: f.Clocks  # how often each has been encoded
    encoded: f.Owners  # the segments whose last encoding is kept
    versions: f.Clocks  # the round of each
    # names, shapes, dtypes: of the tensors in the buffers: "residual.0" is of the first of ``residuals``, and there may
    # be a "velocity" and a "basis" of each; "payload.0" is that of the first of ``encoded``
    names: f.Names
    shapes: f.Shapes
    dtypes: f.Dtypes
    buffers: Sequence[Buffer] = field(repr=False, default=())

    def __post_init__(self) -> None:
        f.same_length(self.residuals, self.steps)
        f.same_length(self.encoded, self.versions)
        f.same_length(self.names, self.shapes, self.dtypes)


@message(85)
class LedgerPage(Message):
    """The requests of one member that it may repeat, and how they are answered."""

    node: NodeField
    done: f.Seq  # see ``Sender``
    seqs: f.Clocks  # the numbers of requests that have been answered
    # for each, one frame: the answer, or a ``Pull`` where the values of now are the answer
    buffers: Sequence[Buffer] = field(repr=False, default=())


# ---- tables


@message(75)
class ClosedRowRounds(Message):
    """The next round of each of these tables' segments is over."""

    store: f.Store
    ids: f.Ids
    versions: f.Clocks  # the number of each segment's round
    contributors: Members  # with a quorum, who has contributed to each; else empty
    lr: f.Number  # lr, rescale, changes: what the optimizer updates with; see ``Push``
    rescale: f.Number
    changes: f.Changes
    failures: Failures  # the places of the segments that the round has left unchanged, and why
    counts: f.Counts  # how many rows each segment that did not fail is updated with
    # whether the rows of all these segments, which are of one width and dtype, are one array
    together: Annotated[bool, f.flag]
    # the ids of all these segments (int64; those of a segment rise), and the sums of the rows: one array, or one for
    # each segment; see ``arrays``
    buffers: Sequence[Buffer] = field(repr=False, default=())

    def __post_init__(self) -> None:
        f.same_length(self.ids, self.versions)
        if self.contributors:
            f.same_length(self.ids, self.contributors)


@message(86, parallel=("changed", "counts"))
class StripeState(Message):
    """A table's segment, as in ``InitTables``, without its rows."""

    store: f.Store
    id: f.SegmentId
    key: Annotated[Any, f.key]
    table: Annotated[list[Any], table]
    stripe: Annotated[int, f.integer()]
    stripes: Annotated[int, f.integer(1)]
    version: f.Seq  # how many rounds are over; 0 where every push is an update
    updates: f.Seq  # how many updates its rows have had
    pushed: RankClocks  # pushed, failures: see ``BucketState``
    failures: Failures
    changed: f.Clocks  # the last rounds whose changed rows are known
    counts: f.Counts  # how many rows each of them has changed
    buffers: Sequence[Buffer] = field(repr=False, default=())  # for each of ``changed``, the ids of these rows (int64)


@message(87, parallel=("names", "dtypes", "columns"))
class TablePage(Message):
    """Rows of a table's segment, with all that belongs to each; see ``PutRows``."""

    store: f.Store
    id: f.SegmentId
    count: f.Count
    names: f.Names  # names, dtypes, columns: of what each row has beside its values
    dtypes: f.Dtypes
    columns: f.Columns
    buffers: Sequence[Buffer] = field(repr=False, default=())  # the ids (int64), the rows, and each of ``names``


@message(88)
class TableRest(Message):
    """All pages of a table's segment have come. This is what decides, beside its rows, how it goes on."""

    store: f.Store
    id: f.SegmentId
    names: f.Names  # of arrays of int64, by ``kvstore.rows.row_table.RowTable.rest``
    buffers: Sequence[Buffer] = field(repr=False, default=())  # each of ``names``
