"""The messages of readers, which take no part in training: to the scheduler, and to servers. They change nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

from kvstore.job.settings import MAX_NODES
from kvstore.spec import MAX_SEGMENTS
from kvstore.wire import fields as f
from kvstore.wire.arrays import padded
from kvstore.wire.frames import Buffer, message
from kvstore.wire.messages import (
    At,
    Dtypes,
    Ids,
    Keys,
    Kinds,
    Lineage,
    Rank,
    Reply,
    Request,
    Seq,
    Shapes,
    Store,
    require_known,
    same_length,
)
from kvstore.wire.rendezvous import Elements, require_counted
from kvstore.wire.rows import Count, MaybeTables, SegmentId, Wide

NOT_HELD = -1  # the number of what a reader does not hold, or holds of another lineage than it names

Versions = Annotated[list[int], f.integers(NOT_HELD, 2**62 - 1)]
Slack = Annotated[int, f.integer(0, 2**62)]


@message(140)
@dataclass(frozen=True)
class Connect(Request):
    """To the scheduler: I want to read. Asked again, where are the servers now? My ``incarnation`` is random."""


@message(141)
@dataclass(frozen=True)
class Connected(Reply):
    """You may read.

    Attributes:
        rank: the number of this reader among those that are there.
        servers: their addresses, by rank; empty until all members have joined.
    """

    rank: Rank
    servers: Annotated[list[str], f.list_of(f.text(512), MAX_NODES)]


@message(142)
@dataclass(frozen=True)
class FindKeys(Request):
    """To the scheduler: where are these keys of the store with this name?"""

    name: Annotated[str, f.text()]
    keys: Keys


@message(143)
@dataclass(frozen=True)
class KeysFound(Reply):
    """What the keys are, and where; see ``Declare`` and ``Placed``.

    Attributes:
        store: its number, which servers know it by.
    """

    store: Store
    kinds: Kinds
    shapes: Shapes
    dtypes: Dtypes
    tables: MaybeTables
    counts: Annotated[list[int], f.integers(1, MAX_SEGMENTS)]
    ids: Ids
    servers: Annotated[list[int], f.integers(0, MAX_NODES)]
    starts: Elements
    stops: Elements

    def __post_init__(self) -> None:
        same_length(self.kinds, self.counts)
        same_length(self.shapes, self.dtypes, self.tables)
        same_length(self.ids, self.servers, self.starts, self.stops)
        require_known(self.kinds, self.shapes)
        require_counted(self.counts, self.ids)


@message(144)
@dataclass(frozen=True)
class ListKeys(Request):
    """To the scheduler: which keys has the store with this name? Tell me of those from the ``start``-th on."""

    name: Annotated[str, f.text()]
    start: Seq


@message(145)
@dataclass(frozen=True)
class KeysListed(Reply):
    """Some of the keys that have values, in the order in which they were declared; ``more`` if there are others."""

    keys: Keys
    more: Annotated[bool, f.flag]


@message(146)
@dataclass(frozen=True)
class ReadValues(Request):
    """To a server: what are the values of segments ``ids`` now, each as a round has left it?

    Attributes:
        lineage: of the versions. In another one all values come.
        versions: of each segment, the number of the version that I hold, or ``NOT_HELD``.
        slack: a value that I hold need not come if no more than so many rounds have gone since.
    """

    store: Store
    ids: Ids
    lineage: Lineage
    versions: Versions
    slack: Slack

    def __post_init__(self) -> None:
        same_length(self.ids, self.versions)


@message(147)
@dataclass(frozen=True)
class ValuesRead(Reply):
    """The values of some of the segments that were asked for; the others are as you hold them.

    Attributes:
        lineage: of the versions.
        versions: of all segments, the numbers: of the value that is here or, where none is, the latest.
        positions: in the request's list, of the segments whose values are here. They rise.
        buffers: their values in one buffer, each aligned to ``kvstore.wire.reading.ALIGN`` bytes; none without values.
    """

    lineage: Lineage
    versions: Versions
    positions: Annotated[list[int], f.rising(0, MAX_SEGMENTS)]
    buffers: Sequence[Buffer] = field(repr=False, default=())


@message(148)
@dataclass(frozen=True)
class ReadRows(Request):
    """To a server: what are ``count`` rows of table segment ``id`` now? See ``ReadValues``.

    Attributes:
        lineage: of the versions of the rows that I hold; None if I hold none.
        buffers: the ids of the rows, int32 or, if ``wide``, int64; then, if I hold any, the number of the version of
            each, int64, or ``NOT_HELD``.
    """

    store: Store
    id: SegmentId
    count: Count
    wide: Wide
    lineage: Annotated[int | None, f.optional(f.integer(0, 2**62))]
    slack: Slack
    buffers: Sequence[Buffer] = field(repr=False, default=())


@message(149)
@dataclass(frozen=True)
class RowsRead(Reply):
    """``count`` of the rows, as the table has them in the state ``at``; the others are as you hold them.

    Attributes:
        buffers: the rows; and unless all are here, their positions in the request, int64, which rise.
    """

    at: At
    count: Count
    buffers: Sequence[Buffer] = field(repr=False, default=())


ALIGN = 64  # bytes


def aligned(nbytes: int) -> int:
    """Return how many bytes a value takes where several are in one buffer."""
    return padded(nbytes, ALIGN)


READS = (Connect, FindKeys, ListKeys, ReadValues, ReadRows)  # the requests that readers make, beside Explain and Leave
