"""Guests of a job (observers and readers), and the reports of members that observers see.

Members report with their beats, over the link of these. Observers take no part in the job: they ask the scheduler, and
change nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import Annotated, Any

from kvstore.job.settings import MAX_NODES
from kvstore.spec import MAX_SEGMENTS
from kvstore.wire import fields as f
from kvstore.wire.coding import Buffer, message, padded
from kvstore.wire.members import Elements, MemberNotice, require_counted
from kvstore.wire.message import (
    Message,
    Reply,
    Request,
    require_known,
)
from kvstore.wire.rows import (
    MaybeTables,
)
from kvstore.wire.versions import ReadTable, ReadVersion

MOST_LOCATED = 64  # members that one question may be about
MOST_VALUES = 32  # named values of a report
MOST_EVENTS = 256  # lines of news in one answer
MOST_THREADS = 64
MOST_FRAMES = 64  # of a thread, the innermost
UNASKED = 0  # the number of ``Stacks`` that nobody has asked for
MAX_PLACE = 512  # characters of a file, a line and a function

Time = Annotated[float, f.number]  # seconds, by the sender's monotonic clock
Counter = Annotated[int, f.integer()]
Counts = Annotated[list[int], f.list_of(f.integer(), MAX_NODES)]
Short = Annotated[str, f.text(256)]
NamedValues = Annotated[list[list[Any]], f.list_of(f.tuple_of(f.text(64), f.number), MOST_VALUES)]
Place = Annotated[str, f.text(MAX_PLACE)]
ThreadStacks = Annotated[
    list[list[Any]],
    f.list_of(f.tuple_of(f.text(128), f.list_of(f.text(MAX_PLACE), MOST_FRAMES)), MOST_THREADS),
]
MemberRecord = f.tuple_of(
    f.choice("worker", "server", "standby", "aggregator"),
    f.integer(-1, MAX_NODES),
    f.integer(),
    f.choice("joined", "ready", "left", "lost"),
    f.number,
    f.text(512),
    f.text(f.MAX_HOST),
    f.integer(0, f.MAX_PID),
)


@message(150)
class WorkerReport(MemberNotice):
    """What a worker has done since it joined. All counts only grow."""

    at: Time  # when
    rounds: Counter  # how often it has pushed its most pushed key
    blocked_us: Counter  # microseconds its callers have waited for answers
    # microseconds it has waited for data, as far as ``fit``, ``Trainer`` or the program has said; -1 if nobody has
    input_us: Annotated[int, f.integer(-1)]
    cpu_us: Counter  # microseconds of processor time of the process
    memory: Counter  # bytes that the process has in memory
    outstanding: Counter  # requests without an answer
    ahead: Counter  # how many pushes it was ahead of the slowest worker when it last read, in stores with a staleness
    # sent, received: bytes to and from each server, or, where there is an aggregator, to and from it alone
    sent: Counts
    received: Counts
    values: NamedValues = field(default_factory=list)  # the latest of what the program logs: loss, accuracy, epoch


@message(151, parallel=("came_last", "alone_us"))
class ServerReport(MemberNotice):
    """What a server, a standby or an aggregator has done since it joined. Counts only grow."""

    at: Time  # when
    # the highest number of rounds that are over of any segment; where each push is an update, of updates
    rounds: Counter
    busy_us: Counter  # microseconds it has handled messages
    cpu_us: Counter  # cpu_us, memory: see ``WorkerReport``
    memory: Counter
    held: Counter  # bytes of parameters
    received: Counter  # received, sent: bytes of gradients and of values
    sent: Counter
    waves: Counter  # how many rounds have been judged by who came last; see ``came_last``
    came_last: Counts  # for each worker, in how many of them it came last
    alone_us: Counts  # for each worker, how long others have waited for it alone, in microseconds
    waiting: f.Ranks  # waiting, missing: the workers that wait at this moment, and those they wait for
    missing: f.Ranks
    oldest_us: Counter  # how long the request has waited that waits for longest; 0 for none
    why: Annotated[str, f.text(1024)] = ""  # what it waits for, in words
    version: Counter = 0  # of what is published, the newest; 0 for none
    followers: Counter = 0  # readers that have asked for versions lately
    behind: Counter = 0  # how many versions the last of them is behind


@message(152)
class Where(Message):
    """From the scheduler, to a member: where are you in your code? It answers ``Stacks`` with the same ``number``."""

    number: f.Seq


@message(153)
class Stacks(MemberNotice):
    """Where the member is."""

    number: f.Seq  # of the question; ``UNASKED`` from the process beside a member that has been stopped
    # of the thread in which the process has joined the job, or of its main thread if that one has ended: the innermost
    # frame of the program's own code, as ``train.py:41 in load_batch``
    place: Place
    doing: Short  # what that thread does there, in the words of ``kvstore.member.stacks``
    threads: ThreadStacks  # for each thread its name, and its frames as texts like ``place``, the innermost last


@message(154)
class Locate(Request):
    """To the scheduler: where are these members of ``role`` in their code?"""

    role: f.Role
    ranks: Annotated[list[int], f.rising(0, MAX_NODES)]


@message(155, parallel=("ranks", "places"))
class Located(Reply):
    """They are there."""

    ranks: Annotated[list[int], f.rising(0, MAX_NODES)]  # of the members
    # of each, in words that follow "worker 1 ": ``is at train.py:41 in load_batch``
    places: Annotated[list[str], f.list_of(f.text(), MAX_NODES)]
    # for each that has answered, in order, the encoded ``Stacks``
    buffers: Sequence[Buffer] = field(repr=False, default=())


@message(156)
class Observe(Request):
    """To the scheduler, from an observer: how is the job?"""

    after: f.Seq  # the number of the latest event that the observer has


@message(157)
class Observed(Reply):
    """It is like this."""

    at: Time  # the scheduler's time, by its monotonic clock
    started: Time  # when the scheduler began, by the same
    # how many workers, servers, standbys and aggregators the job has
    expected: Annotated[list[int], f.integers(0, MAX_NODES)]
    # those that have joined: role, rank, incarnation, state, seconds since the last sign of life, address, host and
    # process id; see ``Join`` for the last three
    members: Annotated[list[list[Any]], f.list_of(MemberRecord, 4 * MAX_NODES)]
    failure: Annotated[str | None, f.optional(f.text())]  # why the job has failed; None if it has not
    waits: f.Text  # what the scheduler's own barriers and joins wait for, in words; empty for nothing
    first_event: f.Seq  # the number of the first of ``events``
    # what has happened: its time, and a line
    events: Annotated[list[list[Any]], f.list_of(f.tuple_of(f.number, f.text()), MOST_EVENTS)]
    # for each of ``buffers``, the place of its member in ``members``
    owners: Annotated[list[int], f.integers(0, 4 * MAX_NODES)]
    # the ranks of the workers that ``waits`` is about, of those that have joined and have not left
    awaited: f.Ranks = field(default_factory=list)
    # encoded reports; of each member the one of some six seconds ago, if there is one, then the latest
    buffers: Sequence[Buffer] = field(repr=False, default=())


NOT_HELD = -1  # the number of what a reader does not hold, or holds of another lineage than it names

Versions = Annotated[list[int], f.integers(NOT_HELD, 2**62 - 1)]
Slack = Annotated[int, f.integer(0, 2**62)]

# ---- readers. They change nothing


@message(140)
class Connect(Request):
    """To the scheduler: I want to read. Asked again, where are the servers now? My ``incarnation`` is random."""


@message(141)
class Connected(Reply):
    """You may read."""

    rank: f.Rank  # the number of this reader among those that are there
    # their addresses, by rank; empty until all members have joined
    servers: Annotated[list[str], f.list_of(f.text(512), MAX_NODES)]


@message(142)
class FindKeys(Request):
    """To the scheduler: where are these keys of the store with this name?"""

    name: Annotated[str, f.text()]
    keys: f.Keys


@message(143)
class KeysFound(Reply):
    """What the keys are, and where; see ``Declare`` and ``Placed``."""

    store: f.Store  # its number, which servers know it by
    kinds: f.Kinds
    shapes: f.Shapes
    dtypes: f.Dtypes
    tables: MaybeTables
    counts: Annotated[list[int], f.integers(1, MAX_SEGMENTS)]
    ids: f.Ids
    servers: Annotated[list[int], f.integers(0, MAX_NODES)]
    starts: Elements
    stops: Elements

    def __post_init__(self) -> None:
        f.same_length(self.kinds, self.counts)
        f.same_length(self.shapes, self.dtypes, self.tables)
        f.same_length(self.ids, self.servers, self.starts, self.stops)
        require_known(self.kinds, self.shapes)
        require_counted(self.counts, self.ids)


@message(144)
class ListKeys(Request):
    """To the scheduler: which keys has the store with this name? Tell me of those from the ``start``-th on."""

    name: Annotated[str, f.text()]
    start: f.Seq


@message(145)
class KeysListed(Reply):
    """Some of the keys that have values, in the order in which they were declared; ``more`` if there are others."""

    keys: f.Keys
    more: Annotated[bool, f.flag]


@message(146, parallel=("ids", "versions"))
class ReadValues(Request):
    """To a server: what are the values of segments ``ids`` now, each as a round has left it?"""

    store: f.Store
    ids: f.Ids
    lineage: f.Lineage  # of the versions. In another one all values come.
    versions: Versions  # of each segment, the number of the version that I hold, or ``NOT_HELD``
    slack: Slack  # a value that I hold need not come if no more than so many rounds have gone since


@message(147)
class ValuesRead(Reply):
    """The values of some of the segments that were asked for; the others are as you hold them."""

    lineage: f.Lineage  # of the versions
    versions: Versions  # of all segments, the numbers: of the value that is here or, where none is, the latest
    # in the request's list, of the segments whose values are here. They rise.
    positions: Annotated[list[int], f.rising(0, MAX_SEGMENTS)]
    # their values in one buffer, each aligned to ``ALIGN`` bytes; none without values
    buffers: Sequence[Buffer] = field(repr=False, default=())


@message(148)
class ReadRows(Request):
    """To a server: what are ``count`` rows of table segment ``id`` now? See ``ReadValues``."""

    store: f.Store
    id: f.SegmentId
    count: f.Count
    wide: f.Wide
    # of the versions of the rows that I hold; None if I hold none
    lineage: Annotated[int | None, f.optional(f.integer(0, 2**62))]
    slack: Slack
    # the ids of the rows, int32 or, if ``wide``, int64; then, if I hold any, the number of the version of each, int64,
    # or ``NOT_HELD``
    buffers: Sequence[Buffer] = field(repr=False, default=())


@message(149)
class RowsRead(Reply):
    """``count`` of the rows, as the table has them in the state ``at``; the others are as you hold them."""

    at: f.At
    count: f.Count
    # the rows; and unless all are here, their positions in the request, int64, which rise
    buffers: Sequence[Buffer] = field(repr=False, default=())


ALIGN = 64  # bytes


def aligned(nbytes: int) -> int:
    """Return how many bytes a value takes where several are in one buffer."""
    return padded(nbytes, ALIGN)


# the requests that readers make, beside Explain and Leave
READS = (Connect, FindKeys, ListKeys, ReadValues, ReadRows, ReadVersion, ReadTable)
