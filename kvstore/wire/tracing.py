"""The messages of a job's trace: members send what they have noted to the scheduler, and an observer fetches it there.

What a member notes is a *record*: a list that begins with its number and its kind. A chunk carries some of them in one
frame of msgpack. The scheduler passes chunks on as they are. Whoever makes a trace of them reads them with
``read_records``, which trusts nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgpack

from kvstore.errors import WireError
from kvstore.job.settings import MAX_NODES
from kvstore.wire import fields as f
from kvstore.wire.frames import Buffer, decode, message
from kvstore.wire.messages import Reply, Request, Seq, TracedRounds
from kvstore.wire.rendezvous import MemberNotice

MOST_RECORDS = 4096  # in one chunk
MAX_CHUNK = 2 << 20  # bytes of a chunk's records
SENT_CHUNK = 24 << 10  # what members send: a larger frame would go through shared memory, which the scheduler has not
MOST_CHUNKS = 256  # in one answer
MOST_STARTS = 16  # of the scheduler that one chunk tells of
MOST_THREADS = 256
MOST_ANSWERS = 2 * MAX_NODES  # replies that one record names

SPAN = 0  # start, end, thread, name, first key, how many keys, bytes, round
ASKED = 1  # when, number of the request, name, first key, how many keys, bytes, round, thread, peer
ANSWERED = 2  # when, number of the request, thread, peer
# start, when the replies left, end, thread, name, who asked, number of the request, bytes, round, what was answered: of
# each reply who had asked, and the number of the request. Without a request, who asked is ["", -1, 0].
HANDLED = 3
MARK = 4  # when, a text

Clock = f.tuple_of(f.integer(1), f.number, f.number)
Thread = f.tuple_of(f.integer(0, 2**64 - 1), f.text(128))

_NODE = f.tuple_of(f.text(16), f.integer(-1, MAX_NODES), f.integer(0, 2**63 - 1))
_THREAD = f.integer(0, 2**64 - 1)
_NAME = f.text(128)
_numbers = f.integers()
_KEY = f.optional(f.key)
_CHECKS: Mapping[int, f.Check] = {
    SPAN: f.tuple_of(
        f.integer(), f.integer(), f.number, f.number, _THREAD, _NAME, _KEY, f.integer(), f.integer(), f.integer()
    ),
    ASKED: f.tuple_of(
        f.integer(),
        f.integer(),
        f.number,
        f.integer(),
        _NAME,
        _KEY,
        f.integer(),
        f.integer(),
        f.integer(),
        _THREAD,
        f.text(64),
    ),
    ANSWERED: f.tuple_of(f.integer(), f.integer(), f.number, f.integer(), _THREAD, f.text(64)),
    HANDLED: f.tuple_of(
        f.integer(),
        f.integer(),
        f.number,
        f.number,
        f.number,
        _THREAD,
        _NAME,
        _NODE,
        f.integer(),
        f.integer(),
        f.integer(),
        f.list_of(f.tuple_of(_NODE, f.integer()), MOST_ANSWERS),
    ),
    MARK: f.tuple_of(f.integer(), f.integer(), f.number, f.text(512)),
}


@message(160)
@dataclass(frozen=True)
class TraceChunk(MemberNotice):
    """What a member has noted.

    Attributes:
        offsets: for each start of the scheduler that the member has heard: its number; what to add to the member's
            times to have the scheduler's, in seconds; and by how much that may be wrong.
        thread_names: the numbers and names of the member's threads.
        over: whether the member has passed its last round that is of interest.
        buffers: one frame, the records.
    """

    offsets: Annotated[list[list[Any]], f.list_of(Clock, MOST_STARTS)]
    thread_names: Annotated[list[list[Any]], f.list_of(Thread, MOST_THREADS)]
    over: Annotated[bool, f.flag]
    buffers: Sequence[Buffer] = field(repr=False, default=())

    def __post_init__(self) -> None:
        if sum(map(len, self.buffers)) > MAX_CHUNK:
            raise WireError(f"expected records of at most {MAX_CHUNK} bytes")


@message(161)
@dataclass(frozen=True)
class FetchTrace(Request):
    """To the scheduler, from an observer: what have members noted?

    Attributes:
        after: the number of the latest chunk that the observer has; those up to it may be forgotten.
        traced: the first and the last round that members are to note; both 0 for those that they note already.
    """

    after: Seq
    traced: TracedRounds = field(default_factory=lambda: [0, 0])


@message(162)
@dataclass(frozen=True)
class TraceFetched(Reply):
    """They have noted this.

    Attributes:
        first: the number of the first chunk in this answer.
        dropped: how many chunks the scheduler has had no room for, and has forgotten.
        more: whether there are more chunks already.
        buffers: of each chunk its two frames.
    """

    first: Seq
    dropped: Seq
    more: Annotated[bool, f.flag]
    buffers: Sequence[Buffer] = field(repr=False, default=())

    @property
    def chunks(self) -> list[TraceChunk]:
        """The chunks, in order.

        Raises:
            WireError: they are no chunks.
        """
        if len(self.buffers) % 2 or len(self.buffers) > 2 * MOST_CHUNKS:
            raise WireError(f"expected two frames for each of at most {MOST_CHUNKS} chunks, got {len(self.buffers)}")
        made = [decode(self.buffers[start : start + 2]) for start in range(0, len(self.buffers), 2)]
        if not all(isinstance(chunk, TraceChunk) for chunk in made):
            raise WireError("expected chunks of a trace, got other messages")
        return made


def packed(records: Sequence[Sequence[Any]]) -> bytes:
    """Return the frame of ``records``."""
    frame: bytes = msgpack.packb(records)
    return frame


def read_records(chunk: TraceChunk) -> list[list[Any]]:
    """Return the records of ``chunk``, checked.

    Raises:
        WireError: they are not records.
    """
    read = _unpacked(chunk)
    for record in read:
        check = _CHECKS.get(record[1]) if type(record) is list and len(record) > 1 and type(record[1]) is int else None
        if check is None:
            raise WireError("a record of an unknown kind")
        check(record)
    return read


def numbers_of(chunk: TraceChunk) -> list[int]:
    """Return the numbers of the records of ``chunk``, of which nothing else is checked: that costs fifty times as much.

    Raises:
        WireError: these are no numbers.
    """
    numbers: list[Any] = [record[0] if type(record) is list and record else None for record in _unpacked(chunk)]
    _numbers(numbers)
    return numbers


def _unpacked(chunk: TraceChunk) -> list[Any]:
    if len(chunk.buffers) != 1:
        raise WireError(f"expected one frame of records, got {len(chunk.buffers)}")
    try:
        read = msgpack.unpackb(
            chunk.buffers[0], max_array_len=max(MOST_RECORDS, MOST_ANSWERS), max_map_len=0, max_ext_len=0
        )
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as exc:
        raise WireError(f"the records are not msgpack: {exc}") from None
    if type(read) is not list or len(read) > MOST_RECORDS:
        raise WireError(f"expected a list of at most {MOST_RECORDS} records")
    return read
