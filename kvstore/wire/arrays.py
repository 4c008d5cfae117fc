"""Workers, aggregators and servers: values, gradients, optimizers and their states; device memory that is lent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from kvstore.errors import WireError
from kvstore.job.settings import MAX_NODES
from kvstore.lineage import UNKNOWN
from kvstore.rule import AGGREGATE, LATE, MAX_STALENESS, MODES
from kvstore.spec import HALVES, sum_dtype
from kvstore.wire import fields as f
from kvstore.wire.frames import ATTRIBUTE, Buffer, SharedFields, message
from kvstore.wire.messages import (
    Clocks,
    Dtypes,
    Ids,
    Keys,
    Kinds,
    Lineage,
    Mults,
    Number,
    Pairs,
    Ranks,
    Reply,
    Request,
    Seq,
    Shapes,
    Store,
    Text,
    require_known,
    same_length,
)

CodecDescription = Annotated[
    "list[Any] | None",
    f.optional(f.tuple_of(f.text(16), f.list_of(f.tuple_of(f.text(32), f.hyperparameter), 16))),
]  # a type of compression and its numbers; see ``kvstore.codecs``
Lengths = Annotated[list[int], f.integers(0, 1 << 40)]  # bytes of each payload
SegmentCounts = Annotated[list[int], f.integers(1, 1 << 20)]  # of how many segments each payload is; empty: of one
Owners = Annotated[list[int], f.integers(0, 2**32)]  # of states: the segment of each, which may have several
Names = Annotated[list[str], f.list_of(f.text(64))]

# The fields of a rule that not every value of their type suits.
Mode = Annotated[str, f.choice(*MODES)]
Staleness = Annotated["int | None", f.optional(f.integer(0, MAX_STALENESS))]
Quorum = Annotated["int | None", f.optional(f.integer(1, MAX_NODES))]
Late = Annotated[str, f.choice(*LATE)]
Aggregation = Annotated[str, f.choice(*AGGREGATE)]

MAX_PRIORITY = 2**31
Priority = Annotated["int | None", f.optional(f.integer(-MAX_PRIORITY, MAX_PRIORITY))]

MAX_GROUPS = 4096
Groups = Annotated[
    list[list[Any]],
    f.list_of(f.tuple_of(f.list_of(f.key), f.list_of(f.tuple_of(f.text(64), f.hyperparameter), 64)), MAX_GROUPS),
]  # keys, and their own hyper-parameters
Changes = Annotated[
    list[list[Any]],
    f.list_of(f.tuple_of(f.integer(0, MAX_GROUPS), f.text(64), f.hyperparameter), 1 << 16),
]  # hyper-parameters: number of the group (0: all keys), name, value


@message(40)
@dataclass(frozen=True)
class Open(Request):
    """I use ``store``, by this rule; see ``kvstore.rule``.

    Attributes:
        lineage: which the store begins with where this is the first ``Open`` of it; see ``kvstore.lineage``.
    """

    store: Store
    mode: Mode
    staleness: Staleness = None
    quorum: Quorum = None
    late: Late = LATE[0]
    compensation: Annotated[float, f.number] = 0.0
    finite: Annotated[bool, f.flag] = False
    aggregate: Aggregation = AGGREGATE[0]
    lineage: Lineage = UNKNOWN


@message(41)
@dataclass(frozen=True)
class Init(Request):
    """From rank 0: new segments of one dtype, with their first values. The i-th segment has shape ``shapes[kinds[i]]``.

    In this message, in ``Push`` and in ``Values``, the buffers together are the elements of the segments, back to back
    in the order of the ids. A buffer may end anywhere.
    """

    store: Store
    ids: Ids
    keys: Keys
    kinds: Kinds
    shapes: Shapes
    dtype: Annotated[str, f.dtype]
    buffers: Sequence[Buffer] = field(repr=False)

    def __post_init__(self) -> None:
        same_length(self.ids, self.keys, self.kinds)
        require_known(self.kinds, self.shapes)


_VALUES = ("store", "ids", "want", "lr", "rescale", "codec", "lengths", "segment_counts")
_ALIKE = (*_VALUES, "back", "changes", "priority", "encode", "in_float32")


@message(42, shared=_ALIKE, sent={"clocks": "sent_clocks"})
@dataclass(frozen=True)
class Push(Request):
    """My contribution ``clocks[i]`` to segment ``ids[i]``. A single clock is that of all segments.

    Attributes:
        want: whether the answer brings the values once the push has taken effect.
        lr, rescale: hyper-parameters of the update of this round; None takes the optimizer's own (sync), or the last
            ones given (async).
        changes: other hyper-parameters that differ from the optimizer's.
        codec: how the values are compressed; None if they are not. With a codec, the buffers are payloads.
        lengths: bytes of each payload; ``pack_arrays`` has laid them out.
        segment_counts: of how many segments each payload is; empty if each is of one.
        back: how the values of the answer are to be compressed.
        priority: of the answer among messages that wait to leave; see ``Transport.send``.
        ranks: from an aggregator, the workers whose contributions these values are the sum of, in order; else empty.
        rank_clocks: the clock of each of ``ranks`` for all segments, where they differ; else empty. ``clocks`` then has
            the highest of them for each segment.
        encode: to an aggregator: how to compress the sum that these plain values are a part of.
        in_float32: whether plain values are float32, for segments of half precision: they are sums, which are rounded
            when they have been used.
    """

    store: Store
    ids: Ids
    clocks: Clocks
    want: Annotated[bool, f.flag]
    lr: Number
    rescale: Number
    codec: CodecDescription = None
    lengths: Lengths = field(default_factory=list)
    segment_counts: SegmentCounts = field(default_factory=list)
    back: CodecDescription = None
    changes: Changes = field(default_factory=list)
    priority: Priority = None
    ranks: Ranks = field(default_factory=list)
    rank_clocks: Clocks = field(default_factory=list)
    encode: CodecDescription = None
    in_float32: Annotated[bool, f.flag] = False
    buffers: Sequence[Buffer] = field(repr=False, default=())

    def __post_init__(self) -> None:
        ids, clocks = self.ids, self.clocks
        if len(ids) != len(clocks):
            if len(clocks) != 1 or not ids:
                same_length(ids, clocks)
            self.__dict__["clocks"] = clocks * len(ids)
        if self.codec is not None:
            same_length(self.segment_counts or self.ids, self.lengths)
        if self.rank_clocks:
            same_length(self.ranks, self.rank_clocks)

    def dtype(self, stored: str) -> str:
        """Return the dtype of plain values for segments of dtype ``stored``."""
        if not self.in_float32:
            return stored
        if stored not in HALVES:
            raise WireError(f"values in float32 for segments of {stored}: only half precision has such sums")
        return sum_dtype(stored)

    @property
    def shared(self) -> SharedFields | None:
        """The fields that other pushes of the same segments have alike; None if the message has not been received."""
        return self.__dict__.get(ATTRIBUTE)

    @property
    def sent_clocks(self) -> list[int]:
        """The clocks as they travel: one for all segments, where they are alike."""
        clocks = self.clocks
        return clocks[:1] if len(clocks) > 1 and clocks.count(clocks[0]) == len(clocks) else clocks

    @property
    def workers(self) -> Sequence[int]:
        """The ranks of the workers whose contribution this is, in order."""
        return self.ranks or (self.sender.node.rank,)


@message(43)
@dataclass(frozen=True)
class Pull(Request):
    """The values of segments ``ids``, once they include contribution ``clocks[i]`` of every worker (sync).

    Attributes:
        back: see ``Push``.
        ranks: from an aggregator, the workers that the values are for, in order; else empty.
    """

    store: Store
    ids: Ids
    clocks: Clocks
    back: CodecDescription = None
    ranks: Ranks = field(default_factory=list)

    def __post_init__(self) -> None:
        same_length(self.ids, self.clocks)

    @property
    def workers(self) -> Sequence[int]:
        return self.ranks or (self.sender.node.rank,)


@message(44)
@dataclass(frozen=True)
class Values(Reply):
    """The values of the segments that were asked for, back to back in that order.

    Attributes:
        clocks: the rounds of the segments, where these may be ahead of what was asked for; else empty.
        ahead: how many pushes the asker was ahead of the slowest worker, in a store where every push is an update.
        missed: see ``Ack``.
        lengths, segment_counts: see ``Push``; empty if the values are not compressed.
        priority: that of the push that asked for them.
    """

    clocks: Clocks = field(default_factory=list)
    ahead: Annotated[int, f.integer()] = 0
    missed: Annotated[int, f.integer()] = 0
    lengths: Lengths = field(default_factory=list)
    segment_counts: SegmentCounts = field(default_factory=list)
    priority: Priority = None
    buffers: Sequence[Buffer] = field(repr=False, default=())

    def again(self, seq: int) -> Values:
        """Return the same values as the answer to request ``seq``; both refer to the same buffers."""
        made = object.__new__(Values)
        made.__dict__.update(self.__dict__, seq=seq)
        return made


@message(45)
@dataclass(frozen=True)
class SetOptimizer(Request):
    """Update with this optimizer. It is this worker's ``version``-th call of ``set_optimizer``."""

    store: Store
    version: Seq
    name: Annotated[str, f.text(64)]
    hyper: Pairs
    clip_gradient: Number
    lr_mult: Mults
    wd_mult: Mults
    lr: Number
    rescale: Number
    groups: Groups = field(default_factory=list)


@message(46)
@dataclass(frozen=True)
class Close(Request):
    """I do not use ``store`` any more. When all workers have said so, its values are dropped."""

    store: Store


@message(47)
@dataclass(frozen=True)
class GetStates(Request):
    """What are the optimizer's states of these segments? Without ids: which optimizer is there?"""

    store: Store
    ids: Ids


@message(48)
@dataclass(frozen=True)
class OptimizerStates(Reply):
    """The optimizer's name, None if there is none; for each tensor of its states the segment, name, shape and dtype."""

    optimizer: Annotated[str | None, f.optional(f.text(64))]
    ids: Owners
    names: Names
    shapes: Shapes
    dtypes: Dtypes
    buffers: Sequence[Buffer] = field(repr=False)

    def __post_init__(self) -> None:
        same_length(self.ids, self.names, self.shapes, self.dtypes)


@message(50)
@dataclass(frozen=True)
class Pause(Request):
    """I contribute nothing more until all workers have said so. I have pushed segment ``ids[i]`` ``clocks[i]`` times.

    The scheduler is told first, without ids, and answers at once.

    Attributes:
        number: how many pauses of this store this is, for this worker.
        pushes: how many keys the worker has pushed, each push counted.
    """

    store: Store
    number: Seq
    pushes: Seq
    ids: Ids
    clocks: Clocks

    def __post_init__(self) -> None:
        same_length(self.ids, self.clocks)


@message(51)
@dataclass(frozen=True)
class Resume(Reply):
    """All have paused; the next push of ``ids[i]`` follows round ``clocks[i]``. Worker ``last`` has pushed most."""

    last: Annotated[int, f.integer(0, MAX_NODES)]
    clocks: Clocks


@message(49)
@dataclass(frozen=True)
class PutStates(Request):
    """Replace the optimizer's states by these; see ``OptimizerStates``."""

    store: Store
    ids: Owners
    names: Names
    shapes: Shapes
    dtypes: Dtypes
    buffers: Sequence[Buffer] = field(repr=False)

    def __post_init__(self) -> None:
        same_length(self.ids, self.names, self.shapes, self.dtypes)


Loan = Annotated[int, f.integer(1)]
# ---- memory of devices, between the workers of a host and its aggregator

MAX_LENT = 1 << 40  # bytes
# Fields of either push.
_OF_VALUES = ("store", "ids", "clocks", "want", "lr", "rescale", "changes", "priority", "in_float32")


@message(170)
@dataclass(frozen=True)
class Lend(Request):
    """Read this memory of my device where a ``PushLent`` names the loan.

    Attributes:
        loan: its number among those of this worker and store.
        device, opaque, offset, nbytes: see ``kvstore.devices.Handle``.
    """

    store: Store
    loan: Loan
    device: Annotated[bytes, f.raw(16)]
    opaque: Annotated[bytes, f.raw(64)]
    offset: Annotated[int, f.integer(0, MAX_LENT)]
    nbytes: Annotated[int, f.integer(1, MAX_LENT)]


@message(171)
@dataclass(frozen=True)
class Borrowed(Reply):
    """The memory can be read here; or it cannot, for the reason that ``refusal`` has."""

    refusal: Text = ""


@message(172)
@dataclass(frozen=True)
class PushLent(Request):
    """A ``Push`` to an aggregator, of plain values that are in the memory of ``loan``, from its beginning.

    What it asks for comes back plain.
    """

    store: Store
    loan: Loan
    ids: Ids
    clocks: Clocks
    want: Annotated[bool, f.flag]
    lr: Number
    rescale: Number
    changes: Changes = field(default_factory=list)
    priority: Priority = None
    in_float32: Annotated[bool, f.flag] = False

    def __post_init__(self) -> None:
        same_length(self.ids, self.clocks)

    @classmethod
    def of(cls, push: Push, loan: int) -> PushLent:
        return cls(push.sender, loan=loan, **_described(push))

    def plain(self, buffers: Sequence[Buffer] = ()) -> Push:
        return Push(self.sender, buffers=buffers, **_described(self))


def _described(push: Push | PushLent) -> dict[str, Any]:
    """Return what a push says of its values, wherever they are."""
    return {name: getattr(push, name) for name in _OF_VALUES}
