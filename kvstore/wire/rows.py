"""The messages about tables: rows by their ids. Each server has one segment of a table: the rows of its stripe.

Ids are in buffers: int64 where ``wide`` says so, else int32, in the machine's byte order, back to back for all tables
of the message. Those of one table rise. Rows are in one buffer, table by table, each part as ``kvstore.rows.layout``
lays it out. The receiver checks both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from kvstore.table import CAPACITY_BY, CODECS, DTYPES, INITS, MAX_EVICTIONS, MAX_ROW, MAX_SEED, OWN
from kvstore.wire import fields as f
from kvstore.wire.arrays import Changes, Names, Priority
from kvstore.wire.frames import Buffer, message
from kvstore.wire.messages import (
    At,
    Clocks,
    Dtypes,
    Ids,
    Keys,
    MaybeAt,
    Number,
    Reply,
    Request,
    Seq,
    Store,
    same_length,
)

MAX_ROWS = 1 << 32  # of one table in one message
Counts = Annotated[list[int], f.integers(0, MAX_ROWS)]
RowCodecs = Annotated[list[str], f.list_of(f.choice(*CODECS))]  # how each table's rows are encoded
Count = Annotated[int, f.integer(0, MAX_ROWS)]
SegmentId = Annotated[int, f.integer(0, 2**32 - 1)]
Wide = Annotated[bool, f.flag]
Updates = Annotated[int, f.integer(0, 1 << 61)]  # how many a table has had
MaybeUpdates = Annotated["int | None", f.optional(f.integer(0, 1 << 61))]
Columns = Annotated[list[int], f.integers(0, MAX_ROW)]  # numbers that a row has of each of its parts


def _admission(value: Any) -> None:
    if value != []:
        f.tuple_of(f.choice("count", "probability"), f.number)(value)


_own = f.tuple_of(
    f.optional(f.integer(0, 2**48)),
    f.shape,
    f.choice(*DTYPES),
    f.choice(*INITS),
    f.number,
    f.integer(0, MAX_SEED),
    _admission,
    f.list_of(f.tuple_of(f.choice("unseen", "capacity"), f.integer(1), f.choice("", *CAPACITY_BY)), MAX_EVICTIONS),
    f.choice(*CODECS),
)


def table(value: Any) -> None:
    """What ``kvstore.table.Table.described`` gives."""
    if type(value) is list and len(value) == OWN + 1:
        f.key(value[OWN])
        value = value[:OWN]
    _own(value)


TableList = Annotated[list[list[Any]], f.list_of(table)]
MaybeTables = Annotated[list[Any], f.list_of(f.optional(table))]  # of kinds of keys; None for those of arrays


@dataclass(frozen=True)
class WorkersOwn(Request):
    """A request that a worker makes for itself alone, for no aggregator knows tables."""

    @property
    def workers(self) -> Sequence[int]:
        return (self.sender.node.rank,)


@dataclass(frozen=True)
class OnceDue(WorkersOwn):
    """A request about table segment ``id`` that waits until round ``clock`` is over."""

    store: Store
    id: SegmentId
    clock: Seq

    @property
    def ids(self) -> list[int]:
        """The segment, as other requests that wait for rounds list theirs."""
        return [self.id]

    @property
    def clocks(self) -> list[int]:
        return [self.clock]


@message(120)
@dataclass(frozen=True)
class InitTables(Request):
    """From rank 0: new tables. Segment ``ids[i]`` is stripe ``stripe`` of ``stripes`` of ``tables[i]``, and empty."""

    store: Store
    ids: Ids
    keys: Keys
    tables: TableList
    stripe: Annotated[int, f.integer()]
    stripes: Annotated[int, f.integer(1)]

    def __post_init__(self) -> None:
        same_length(self.ids, self.keys, self.tables)


@message(121)
@dataclass(frozen=True)
class PushRows(WorkersOwn):
    """My contribution ``clocks[i]`` to table segment ``ids[i]``: ``counts[i]`` rows of it, perhaps none.

    Attributes:
        wanted: how many rows of each table the answer is to bring once the push has taken effect.
        want: whether the answer is ``Rows``; else it is an ``Ack``.
        union: the answer brings the rows that the round has changed, and their ids, in place of ``wanted``.
        lr, rescale, changes: see ``Push``.
        codecs: of each table's rows, here and in the answer.
        priority: see ``Push``.
        buffers: the ids, the rows, the ids of the rows that are wanted.
    """

    store: Store
    ids: Ids
    clocks: Clocks
    counts: Counts
    wanted: Counts
    wide: Wide
    want: Annotated[bool, f.flag]
    union: Annotated[bool, f.flag]
    lr: Number
    rescale: Number
    changes: Changes
    codecs: RowCodecs
    priority: Priority = None
    buffers: Sequence[Buffer] = field(repr=False, default=())

    def __post_init__(self) -> None:
        same_length(self.ids, self.clocks, self.counts, self.wanted, self.codecs)


@message(122)
@dataclass(frozen=True)
class PullRows(WorkersOwn):
    """``wanted[i]`` rows of table segment ``ids[i]``, once they include contribution ``clocks[i]`` of every worker.

    Attributes:
        codecs: of each table's rows in the answer.
        buffers: the ids of the rows.
    """

    store: Store
    ids: Ids
    clocks: Clocks
    wanted: Counts
    wide: Wide
    codecs: RowCodecs
    buffers: Sequence[Buffer] = field(repr=False, default=())

    def __post_init__(self) -> None:
        same_length(self.ids, self.clocks, self.wanted, self.codecs)


@message(123)
@dataclass(frozen=True)
class Rows(Reply):
    """The rows that were asked for, in the order of their ids.

    Attributes:
        counts: how many rows there are of each table.
        clocks: the rounds of the tables, where these may be ahead of what was asked for; else empty.
        ahead, missed, priority: see ``Values``.
        wide: whether the ids in the buffers are int64.
        buffers: the rows; after a push with ``union`` also their ids.
    """

    counts: Counts
    clocks: Clocks = field(default_factory=list)
    ahead: Annotated[int, f.integer()] = 0
    missed: Annotated[int, f.integer()] = 0
    wide: Wide = True
    priority: Priority = None
    buffers: Sequence[Buffer] = field(repr=False, default=())


@message(124)
@dataclass(frozen=True)
class PutRows(Request):
    """From rank 0: rows of table segment ``id``, with their states, replace those that are there. For loading.

    Attributes:
        count: how many rows.
        version: how many updates the table has had; None leaves that as it is.
        steps: how many of them its optimizer has made; None leaves that as it is.
        names: of the parts in the buffers that belong to each row beside the row itself; see
            ``kvstore.rows.row_table.RowTable.put``.
        dtypes: of these parts.
        columns: how many numbers of each part a row has; 0: one, in an array of one dimension.
        buffers: the ids (int64), the rows, and each of ``names``.
    """

    store: Store
    id: SegmentId
    count: Count
    version: MaybeUpdates
    steps: MaybeUpdates
    names: Names
    dtypes: Dtypes
    columns: Columns
    buffers: Sequence[Buffer] = field(repr=False, default=())

    def __post_init__(self) -> None:
        same_length(self.names, self.dtypes, self.columns)


@message(133)
@dataclass(frozen=True)
class PutTableRest(Request):
    """From rank 0: what table segment ``id`` has beside its rows, once these have all been put. For loading.

    Attributes:
        names: of arrays of int64; see ``kvstore.rows.row_table.RowTable.rest``.
        buffers: each of ``names``.
    """

    store: Store
    id: SegmentId
    names: Names
    buffers: Sequence[Buffer] = field(repr=False, default=())


@message(125)
@dataclass(frozen=True)
class FreezeTable(OnceDue):
    """Keep table segment ``id`` as it is once round ``clock`` is over, to be read page by page; training goes on.

    Attributes:
        since: only rows that have changed, or gone, since this state; None for all.
    """

    since: MaybeAt


@message(126)
@dataclass(frozen=True)
class Frozen(Reply):
    """The table is kept as number ``number``: ``rows`` rows, and the ids of ``gone`` others, in the state ``at``.

    Attributes:
        slots: pages are read up to here; some of what is before may have no rows.
        steps: how many of its updates the optimizer has made.
        names, dtypes, columns: of what each row has beside its values; see ``PutRows``.
        whole: why these are all rows, though ``FreezeTable.since`` asked for changes; empty if they are what was asked
            for.
    """

    number: Seq
    slots: Annotated[int, f.integer()]
    rows: Annotated[int, f.integer()]
    gone: Annotated[int, f.integer()]
    at: At
    steps: Updates
    names: Names
    dtypes: Dtypes
    columns: Columns
    whole: Annotated[str, f.text(1024)] = ""

    def __post_init__(self) -> None:
        same_length(self.names, self.dtypes, self.columns)


@message(127)
@dataclass(frozen=True)
class ReadFrozen(Request):
    """Rows ``start`` to ``start + count`` of what was frozen as ``number``; or of the ids of those that are gone."""

    store: Store
    number: Seq
    start: Annotated[int, f.integer()]
    count: Count
    gone: Annotated[bool, f.flag]
    state: Annotated[bool, f.flag]


@message(128)
@dataclass(frozen=True)
class FrozenPage(Reply):
    """``count`` rows: their ids (int64), values, and what else each has, in the order of ``Frozen.names``."""

    count: Count
    buffers: Sequence[Buffer] = field(repr=False, default=())


@message(129)
@dataclass(frozen=True)
class Thaw(Request):
    """I do not need what was frozen as ``number`` any more."""

    store: Store
    number: Seq


@message(130)
@dataclass(frozen=True)
class EvictRows(OnceDue):
    """From rank 0: let rows of table segment ``id`` go now, as its rules say, once round ``clock`` is over."""


@message(131)
@dataclass(frozen=True)
class DescribeTable(Request):
    """What are the statistics of table segment ``id``?"""

    store: Store
    id: SegmentId


@message(132)
@dataclass(frozen=True)
class TableCounts(Reply):
    """Statistics of a table segment, by name."""

    names: Names
    counts: Annotated[list[int], f.integers()]

    def __post_init__(self) -> None:
        same_length(self.names, self.counts)
