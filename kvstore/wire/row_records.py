"""What a primary records of its tables, for its standby: see ``records``.

What one worker's request changes is recorded as that request: new tables, pushes where each is an update, rows that are
put, and evictions. The rest is here: rounds that have been closed, and, for a new standby, the whole state of a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from kvstore.wire import fields as f
from kvstore.wire.frames import Buffer, message
from kvstore.wire.messages import Clocks, Dtypes, Ids, Message, Number, Seq, Store, same_length
from kvstore.wire.parameters import Changes, Names
from kvstore.wire.records import Failures, Members, RankClocks
from kvstore.wire.rows import Columns, Count, Counts, SegmentId, table


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
