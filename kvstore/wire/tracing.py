"""The messages of a job's trace: members send what they have noted to the scheduler, and an observer fetches it there.

What a member notes are *rows* of one size, which it writes as it goes, and sends as they are: the job must not wait for
them to be encoded. Names, keys and nodes in them are numbers; what they stand for comes in the same chunk. The
scheduler passes chunks on as they are. Whoever makes a trace of them reads them with ``read_records``, which trusts
nothing, and has each as a *record*: a list that begins with its number and its kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from math import isfinite
from struct import Struct
from typing import Annotated, Any, TypeAlias

import msgpack

from kvstore.errors import WireError
from kvstore.job.settings import MAX_NODES
from kvstore.spec import Key
from kvstore.wire import fields as f
from kvstore.wire.coding import Buffer, decode, message
from kvstore.wire.members import MemberNotice
from kvstore.wire.message import (
    Reply,
    Request,
)

MOST_RECORDS = 1 << 14  # rows of one chunk
MOST_WORDS = 1 << 16  # of one chunk
MAX_CHUNK = 4 << 20  # bytes of a chunk's rows and words
SENT_FRAME = 24 << 10  # what members send: a larger frame would go through shared memory, which the scheduler has not
MOST_CHUNKS = 256  # in one answer
MOST_STARTS = 16  # of the scheduler that one chunk tells of
MOST_THREADS = 256
MOST_ANSWERS = 2 * MAX_NODES  # replies that one record names

# A row: its kind, two words, two threads, three times in seconds, and three integers. What records have of it:
ROW = Struct("<3I2Q3d3q")
SPAN = 0  # start, end, thread, name, first key, how many keys, bytes, round
ASKED = 1  # when, number of the request, name, first key, how many keys, bytes, round, thread, peer
ANSWERED = 2  # when, number of the request, thread, peer
# start, when the replies left, end, thread, name, who asked, number of the request, bytes, round, what was answered: of
# each reply who had asked, and the number of the request. Without a request, who asked is ["", -1, 0].
HANDLED = 3
MARK = 4  # when, a text
REQUEST = 5  # a row alone: read as ASKED and ANSWERED
REPLIES = 6  # a row alone: two replies, or one, of the HANDLED before it

Label: TypeAlias = "tuple[str, Key | None, int]"  # a name, the first key, and how many keys
_UNKNOWN: Label = ("?", None, 0)
_NOBODY = ["", -1, 0]

Clock = f.tuple_of(f.integer(1), f.number, f.number)
Thread = f.tuple_of(f.integer(0, 2**64 - 1), f.text(128))

_WORD = f.integer(0, 2**32 - 1)
_LABELS = f.list_of(f.tuple_of(_WORD, f.text(512), f.optional(f.key), f.integer()), MOST_WORDS)
_NODES = f.list_of(f.tuple_of(_WORD, f.text(16), f.integer(-1, MAX_NODES), f.integer(0, 2**63 - 1)), MOST_WORDS)
_WORDS = f.tuple_of(_LABELS, _NODES)


@message(160)
class TraceChunk(MemberNotice):
    """What a member has noted."""

    # for each start of the scheduler that the member has heard: its number; what to add to the member's times to have
    # the scheduler's, in seconds; and by how much that may be wrong
    offsets: Annotated[list[list[Any]], f.list_of(Clock, MOST_STARTS)]
    # the numbers and names of the member's threads
    thread_names: Annotated[list[list[Any]], f.list_of(Thread, MOST_THREADS)]
    over: Annotated[bool, f.flag]  # whether the member has passed its last round that is of interest
    first: f.Seq  # the number of the first record. What was lost before it has numbers, too.
    records: Annotated[int, f.integer(0, MOST_RECORDS)]  # how many there are
    # the rows of the records, and then the words, cut anywhere
    buffers: Sequence[Buffer] = field(repr=False, default=())

    def __post_init__(self) -> None:
        if not self.records * ROW.size <= sum(map(len, self.buffers)) <= MAX_CHUNK:
            raise WireError(f"expected {self.records} rows and their words, of at most {MAX_CHUNK} bytes")

    @property
    def whole(self) -> TraceChunk:
        """The same chunk with one buffer, of memory of its own."""
        rows = b"".join(self.buffers)
        return TraceChunk(self.node, self.offsets, self.thread_names, self.over, self.first, self.records, [rows])


@message(161)
class FetchTrace(Request):
    """To the scheduler, from an observer: what have members noted?"""

    after: f.Seq  # the number of the latest chunk that the observer has; those up to it may be forgotten
    # the first and the last round that members are to note; both 0 for those that they note already
    traced: f.TracedRounds = field(default_factory=lambda: [0, 0])


@message(162)
class TraceFetched(Reply):
    """They have noted this."""

    first: f.Seq  # the number of the first chunk in this answer
    dropped: f.Seq  # how many chunks the scheduler has had no room for, and has forgotten
    more: Annotated[bool, f.flag]  # whether there are more chunks already
    buffers: Sequence[Buffer] = field(repr=False, default=())  # of each chunk its two frames

    @property
    def chunks(self) -> list[TraceChunk]:
        """The chunks, in order."""
        if len(self.buffers) % 2 or len(self.buffers) > 2 * MOST_CHUNKS:
            raise WireError(f"expected two frames for each of at most {MOST_CHUNKS} chunks, got {len(self.buffers)}")
        made = [decode(self.buffers[start : start + 2]) for start in range(0, len(self.buffers), 2)]
        if not all(isinstance(chunk, TraceChunk) for chunk in made):
            raise WireError("expected chunks of a trace, got other messages")
        return made


def packed(labels: Sequence[tuple[int, Label]], nodes: Sequence[tuple[int, Sequence[Any]]], rows: bytes) -> list[bytes]:
    """Return the buffers of a chunk: what its words stand for, and its rows. What does not fit stays unnamed."""
    while True:
        words = [[number, *label] for number, label in labels], [[number, *node] for number, node in nodes]
        content = rows + msgpack.packb(words)
        if len(content) <= MAX_CHUNK and len(labels) <= MOST_WORDS:
            break
        labels, nodes = labels[len(labels) // 2 + 1 :], nodes[: MOST_WORDS // 2]
    return [content[start : start + SENT_FRAME] for start in range(0, len(content), SENT_FRAME)]


def read_records(chunk: TraceChunk) -> list[list[Any]]:
    """Return the records of ``chunk``, checked."""
    content = b"".join(chunk.buffers)
    end = chunk.records * ROW.size
    labels, nodes = _words(content[end:])
    made: list[list[Any]] = []
    replies: list[Any] | None = None
    for number, row in enumerate(ROW.iter_unpack(content[:end]), chunk.first):
        kind, word, other, thread, second, *numbers = row
        _require_valid(numbers)
        start, end_, left, nbytes, round_, seq = numbers
        label = labels.get(word, _UNKNOWN)
        if kind == SPAN:
            made.append([number, SPAN, start, end_, thread, *label, nbytes, round_])
        elif kind in (ASKED, ANSWERED, REQUEST):
            peer = labels.get(other, _UNKNOWN)[0]
            if kind != ANSWERED:
                made.append([number, ASKED, start, seq, *label, nbytes, round_, thread, peer])
            if kind != ASKED:
                made.append([number, ANSWERED, end_, seq, second, peer])
        elif kind == HANDLED:
            replies, asker = [], nodes.get(other, _NOBODY)
            made.append([number, HANDLED, start, left, end_, thread, label[0], asker, seq, nbytes, round_, replies])
        elif kind == REPLIES:
            if replies is not None:
                replies += [[nodes.get(word, _NOBODY), nbytes], [nodes.get(other, _NOBODY), round_]][: max(1, second)]
        elif kind == MARK:
            made.append([number, MARK, start, label[0]])
        else:
            raise WireError(f"a row of an unknown kind: {kind}")
    return made


def _require_valid(numbers: Sequence[Any]) -> None:
    if not all(map(isfinite, numbers)) or min(numbers[3:]) < 0:
        raise WireError(f"a row has a number that is not valid: {numbers}")


def _words(packed_words: bytes) -> tuple[Mapping[int, Label], Mapping[int, list[Any]]]:
    try:
        words = msgpack.unpackb(packed_words, max_array_len=MOST_WORDS, max_map_len=0, max_ext_len=0)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as exc:
        raise WireError(f"the words are not msgpack: {exc}") from None
    _WORDS(words)
    labels, nodes = words
    return {number: (name, key, keys) for number, name, key, keys in labels}, {number: node for number, *node in nodes}
