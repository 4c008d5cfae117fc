"""The messages about tables: rows by their ids. Each server has one segment of a table: the rows of its stripe.

Ids are in buffers: int64 where ``wide`` says so, else int32, in the machine's byte order, back to back for all tables
of the message. Those of one table rise. Rows are in one buffer, table by table, each part as ``kvstore.rows.layout``
lays it out. The receiver checks both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import Annotated, Any

from kvstore.spec import sum_dtype
from kvstore.table import CAPACITY_BY, CODECS, DTYPES, INITS, MAX_EVICTIONS, MAX_SEED, OWN
from kvstore.wire import fields as f
from kvstore.wire.coding import Buffer, frozen, message
from kvstore.wire.message import (
    Reply,
    Request,
)

RowCodecs = Annotated[list[str], f.list_of(f.choice(*CODECS))]  # how each table's rows are encoded


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


@frozen
class WorkersOwn(Request):
    """A request that a worker makes for itself alone, for no aggregator knows tables."""

    @property
    def workers(self) -> Sequence[int]:
        return (self.sender.node.rank,)


@frozen
class OnceDue(WorkersOwn):
    """A request about table segment ``id`` that waits until round ``clock`` is over."""

    store: f.Store
    id: f.SegmentId
    clock: f.Seq

    @property
    def ids(self) -> list[int]:
        """The segment, as other requests that wait for rounds list theirs."""
        return [self.id]

    @property
    def clocks(self) -> list[int]:
        return [self.clock]


@message(120, parallel=("ids", "keys", "tables"))
class InitTables(Request):
    """From rank 0: new tables. Segment ``ids[i]`` is stripe ``stripe`` of ``stripes`` of ``tables[i]``, and empty."""

    store: f.Store
    ids: f.Ids
    keys: f.Keys
    tables: TableList
    stripe: Annotated[int, f.integer()]
    stripes: Annotated[int, f.integer(1)]


@message(121, parallel=("ids", "clocks", "counts", "wanted", "codecs"))
class PushRows(WorkersOwn):
    """My contribution ``clocks[i]`` to table segment ``ids[i]``: ``counts[i]`` rows of it, perhaps none."""

    store: f.Store
    ids: f.Ids
    clocks: f.Clocks
    counts: f.Counts
    wanted: f.Counts  # how many rows of each table the answer is to bring once the push has taken effect
    wide: f.Wide
    want: Annotated[bool, f.flag]  # whether the answer is ``Rows``; else it is an ``Ack``
    # the answer brings the rows that the round has changed, and their ids, in place of ``wanted``
    union: Annotated[bool, f.flag]
    lr: f.Number  # lr, rescale, changes: see ``Push``
    rescale: f.Number
    changes: f.Changes
    codecs: RowCodecs  # of each table's rows, here and in the answer
    priority: f.Priority = None  # see ``Push``
    # Whether rows without a codec are float32 though their table has half precision. Such rows are sums, and the server
    # rounds only what becomes of them.
    in_float32: Annotated[bool, f.flag] = False
    buffers: Sequence[Buffer] = field(repr=False, default=())  # the ids, the rows, the ids of the rows that are wanted

    def dtype(self, stored: str) -> str:
        """Return the dtype of rows without a codec for tables of dtype ``stored``."""
        return sum_dtype(stored) if self.in_float32 else stored


@message(122, parallel=("ids", "clocks", "wanted", "codecs"))
class PullRows(WorkersOwn):
    """``wanted[i]`` rows of table segment ``ids[i]``, once they include contribution ``clocks[i]`` of every worker."""

    store: f.Store
    ids: f.Ids
    clocks: f.Clocks
    wanted: f.Counts
    wide: f.Wide
    codecs: RowCodecs  # of each table's rows in the answer
    buffers: Sequence[Buffer] = field(repr=False, default=())  # the ids of the rows


@message(123)
class Rows(Reply):
    """The rows that were asked for, in the order of their ids."""

    counts: f.Counts  # how many rows there are of each table
    # the rounds of the tables, where these may be ahead of what was asked for; else empty
    clocks: f.Clocks = field(default_factory=list)
    ahead: Annotated[int, f.integer()] = 0  # ahead, missed, priority: see ``Values``
    missed: Annotated[int, f.integer()] = 0
    wide: f.Wide = True  # whether the ids in the buffers are int64
    priority: f.Priority = None
    buffers: Sequence[Buffer] = field(repr=False, default=())  # the rows; after a push with ``union`` also their ids


@message(124, parallel=("names", "dtypes", "columns"))
class PutRows(Request):
    """From rank 0: rows of table segment ``id``, with their states, replace those that are there. For loading."""

    store: f.Store
    id: f.SegmentId
    count: f.Count  # how many rows
    version: f.MaybeUpdates  # how many updates the table has had; None leaves that as it is
    steps: f.MaybeUpdates  # how many of them its optimizer has made; None leaves that as it is
    # of the parts in the buffers that belong to each row beside the row itself; see
    # ``kvstore.rows.row_table.RowTable.put``
    names: f.Names
    dtypes: f.Dtypes  # of these parts
    columns: f.Columns  # how many numbers of each part a row has; 0: one, in an array of one dimension
    buffers: Sequence[Buffer] = field(repr=False, default=())  # the ids (int64), the rows, and each of ``names``


@message(133)
class PutTableRest(Request):
    """From rank 0: what table segment ``id`` has beside its rows, once these have all been put. For loading."""

    store: f.Store
    id: f.SegmentId
    names: f.Names  # of arrays of int64; see ``kvstore.rows.row_table.RowTable.rest``
    buffers: Sequence[Buffer] = field(repr=False, default=())  # each of ``names``


@message(125)
class FreezeTable(OnceDue):
    """Keep table segment ``id`` as it is once round ``clock`` is over, to be read page by page; training goes on."""

    since: f.MaybeAt  # only rows that have changed, or gone, since this state; None for all


@message(126, parallel=("names", "dtypes", "columns"))
class Frozen(Reply):
    """The table is kept as number ``number``: ``rows`` rows, and the ids of ``gone`` others, in the state ``at``."""

    number: f.Seq
    slots: Annotated[int, f.integer()]  # pages are read up to here; some of what is before may have no rows
    rows: Annotated[int, f.integer()]
    gone: Annotated[int, f.integer()]
    at: f.At
    steps: f.Updates  # how many of its updates the optimizer has made
    names: f.Names  # names, dtypes, columns: of what each row has beside its values; see ``PutRows``
    dtypes: f.Dtypes
    columns: f.Columns
    # why these are all rows, though ``FreezeTable.since`` asked for changes; empty if they are what was asked for
    whole: Annotated[str, f.text(1024)] = ""


@message(127)
class ReadFrozen(Request):
    """Rows ``start`` to ``start + count`` of what was frozen as ``number``; or of the ids of those that are gone."""

    store: f.Store
    number: f.Seq
    start: Annotated[int, f.integer()]
    count: f.Count
    gone: Annotated[bool, f.flag]
    state: Annotated[bool, f.flag]


@message(128)
class FrozenPage(Reply):
    """``count`` rows: their ids (int64), values, and what else each has, in the order of ``Frozen.names``."""

    count: f.Count
    buffers: Sequence[Buffer] = field(repr=False, default=())


@message(129)
class Thaw(Request):
    """I do not need what was frozen as ``number`` any more."""

    store: f.Store
    number: f.Seq


@message(130)
class EvictRows(OnceDue):
    """From rank 0: let rows of table segment ``id`` go now, as its rules say, once round ``clock`` is over."""


@message(131)
class DescribeTable(Request):
    """What are the statistics of table segment ``id``?"""

    store: f.Store
    id: f.SegmentId


@message(132, parallel=("names", "counts"))
class TableCounts(Reply):
    """Statistics of a table segment, by name."""

    names: f.Names
    counts: Annotated[list[int], f.integers()]
