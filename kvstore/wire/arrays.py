"""Workers, aggregators and servers: values, gradients, optimizers and their states; device memory that is lent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import Annotated, Any

from kvstore.errors import WireError
from kvstore.job.settings import MAX_NODES
from kvstore.lineage import UNKNOWN
from kvstore.rule import AGGREGATE, LATE
from kvstore.spec import HALVES, sum_dtype
from kvstore.wire import fields as f
from kvstore.wire.coding import ATTRIBUTE, Buffer, SharedFields, message
from kvstore.wire.message import (
    Reply,
    Request,
    require_known,
)


@message(40)
class Open(Request):
    """I use ``store``, by this rule; see ``kvstore.rule``."""

    store: f.Store
    mode: f.Mode
    staleness: f.Staleness = None
    quorum: f.Quorum = None
    late: f.Late = LATE[0]
    grace: Annotated[float, f.number] = 0.0
    compensation: Annotated[float, f.number] = 0.0
    finite: Annotated[bool, f.flag] = False
    aggregate: f.Aggregation = AGGREGATE[0]
    # which the store begins with where this is the first ``Open`` of it; see ``kvstore.lineage``
    lineage: f.Lineage = UNKNOWN


@message(41)
class Init(Request):
    """From rank 0: new segments of one dtype, with their first values. The i-th segment has shape ``shapes[kinds[i]]``.

    In this message, in ``Push`` and in ``Values``, the buffers together are the elements of the segments, back to back
    in the order of the ids. A buffer may end anywhere.
    """

    store: f.Store
    ids: f.Ids
    keys: f.Keys
    kinds: f.Kinds
    shapes: f.Shapes
    dtype: Annotated[str, f.dtype]
    buffers: Sequence[Buffer] = field(repr=False)

    def __post_init__(self) -> None:
        f.same_length(self.ids, self.keys, self.kinds)
        require_known(self.kinds, self.shapes)


def require_runs(runs: Sequence[Sequence[int]], segments: int) -> None:
    """Raise ``WireError`` unless ``runs`` are ``segments`` segments; see ``Push.runs``."""
    if sum(run[0] for run in runs) != segments:
        raise WireError(f"rows of {sum(run[0] for run in runs)} segments, where there are {segments}")


_VALUES = ("store", "ids", "want", "lr", "rescale", "codec", "lengths", "segment_counts")
_ALIKE = (*_VALUES, "back", "changes", "priority", "encode", "in_float32", "runs")


@message(42, shared=_ALIKE, sent={"clocks": "sent_clocks"})
class Push(Request):
    """My contribution ``clocks[i]`` to segment ``ids[i]``. A single clock is that of all segments."""

    store: f.Store
    ids: f.Ids
    clocks: f.Clocks
    want: Annotated[bool, f.flag]  # whether the answer brings the values once the push has taken effect
    # lr, rescale: hyper-parameters of the update of this round; None takes the optimizer's own (sync), or the last ones
    # given (async)
    lr: f.Number
    rescale: f.Number
    # how the values are compressed; None if they are not. With a codec, the buffers are payloads.
    codec: f.CodecDescription = None
    lengths: f.Lengths = field(default_factory=list)  # bytes of each payload; ``pack_arrays`` has laid them out
    # of how many segments each payload is; empty if each is of one
    segment_counts: f.SegmentCounts = field(default_factory=list)
    back: f.CodecDescription = None  # how the values of the answer are to be compressed
    changes: f.Changes = field(default_factory=list)  # other hyper-parameters that differ from the optimizer's
    priority: f.Priority = None  # of the answer among messages that wait to leave; see ``Transport.send``
    # from an aggregator, the workers whose contributions these values are the sum of, in order; else empty
    ranks: f.Ranks = field(default_factory=list)
    # the clock of each of ``ranks`` for all segments, where they differ; else empty. ``clocks`` then has the highest of
    # them for each segment.
    rank_clocks: f.Clocks = field(default_factory=list)
    # of each worker's values in the mean of their round, beside the other contributions; None is 1
    weight: f.Weight = None
    encode: f.CodecDescription = None  # to an aggregator: how to compress the sum that these plain values are a part of
    # whether plain values are float32, for segments of half precision: they are sums, which are rounded when they have
    # been used
    in_float32: Annotated[bool, f.flag] = False
    # of arrays of which only some rows come, all other elements being 0: what the segments are. The buffers are then
    # how many rows there are in each run (int64), their ids, which rise in each (int32 or int64), and the rows. Empty:
    # all elements come.
    runs: f.RowRuns = field(default_factory=list)
    buffers: Sequence[Buffer] = field(repr=False, default=())

    def __post_init__(self) -> None:
        ids, clocks = self.ids, self.clocks
        if len(ids) != len(clocks):
            if len(clocks) != 1 or not ids:
                f.same_length(ids, clocks)
            self.__dict__["clocks"] = clocks * len(ids)
        if self.codec is not None:
            f.same_length(self.segment_counts or self.ids, self.lengths)
        if self.runs:
            require_runs(self.runs, len(ids))
        if self.rank_clocks:
            f.same_length(self.ranks, self.rank_clocks)

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


@message(43, parallel=("ids", "clocks"))
class Pull(Request):
    """The values of segments ``ids``, once they include contribution ``clocks[i]`` of every worker (sync)."""

    store: f.Store
    ids: f.Ids
    clocks: f.Clocks
    back: f.CodecDescription = None  # see ``Push``
    # from an aggregator, the workers that the values are for, in order; else empty
    ranks: f.Ranks = field(default_factory=list)

    @property
    def workers(self) -> Sequence[int]:
        return self.ranks or (self.sender.node.rank,)


@message(44)
class Values(Reply):
    """The values of the segments that were asked for, back to back in that order."""

    # the rounds of the segments, where these may be ahead of what was asked for; else empty
    clocks: f.Clocks = field(default_factory=list)
    # how many pushes the asker was ahead of the slowest worker, in a store where every push is an update
    ahead: Annotated[int, f.integer()] = 0
    missed: Annotated[int, f.integer()] = 0  # see ``Ack``
    # lengths, segment_counts: see ``Push``; empty if the values are not compressed
    lengths: f.Lengths = field(default_factory=list)
    segment_counts: f.SegmentCounts = field(default_factory=list)
    priority: f.Priority = None  # that of the push that asked for them
    buffers: Sequence[Buffer] = field(repr=False, default=())

    def again(self, seq: int) -> Values:
        """Return the same values as the answer to request ``seq``; both refer to the same buffers."""
        made = object.__new__(Values)
        made.__dict__.update(self.__dict__, seq=seq)
        return made


@message(45)
class SetOptimizer(Request):
    """Update with this optimizer. It is this worker's ``version``-th call of ``set_optimizer``."""

    store: f.Store
    version: f.Seq
    name: Annotated[str, f.text(64)]
    hyper: f.Pairs
    clip_gradient: f.Number
    lr_mult: f.Mults
    wd_mult: f.Mults
    lr: f.Number
    rescale: f.Number
    groups: f.Groups = field(default_factory=list)


@message(46)
class Close(Request):
    """I do not use ``store`` any more. When all workers have said so, its values are dropped."""

    store: f.Store


@message(47)
class GetStates(Request):
    """What are the optimizer's states of these segments? Without ids: which optimizer is there?"""

    store: f.Store
    ids: f.Ids


@message(48, parallel=("ids", "names", "shapes", "dtypes"))
class OptimizerStates(Reply):
    """The optimizer's name, None if there is none; for each tensor of its states the segment, name, shape and dtype."""

    optimizer: Annotated[str | None, f.optional(f.text(64))]
    ids: f.Owners
    names: f.Names
    shapes: f.Shapes
    dtypes: f.Dtypes
    buffers: Sequence[Buffer] = field(repr=False)


@message(50, parallel=("ids", "clocks"))
class Pause(Request):
    """I contribute nothing more until all workers have said so. I have pushed segment ``ids[i]`` ``clocks[i]`` times.

    The scheduler is told first, without ids, and answers at once.
    """

    store: f.Store
    number: f.Seq  # how many pauses of this store this is, for this worker
    pushes: f.Seq  # how many keys the worker has pushed, each push counted
    ids: f.Ids
    clocks: f.Clocks


@message(56, parallel=("ids", "clocks"))
class PassRounds(Request):
    """Everybody goes on from a join behind round ``clocks[i]`` of segment ``ids[i]``: nobody is in earlier rounds.

    Other servers have had pushes of a worker that is lost, and that had made these rounds alone.
    """

    store: f.Store
    ids: f.Ids
    clocks: f.Clocks


@message(58, parallel=("ids", "clocks"))
class Admit(Request):
    """Worker ``rank``, which was started again, is in the rounds after ``clocks[i]`` of segment ``ids[i]``.

    I have pushed the segment so often, and wait for the answer before I push it again.
    """

    store: f.Store
    rank: f.Rank
    incarnation: f.Seq
    ids: f.Ids
    clocks: f.Clocks


@message(66)
class KeepState(Request):
    """Part ``part`` of hand-over ``number``, to worker ``rank`` in its ``incarnation``: keep it for that worker."""

    remembered = False
    rank: f.Rank
    incarnation: f.Seq
    number: f.Seq
    part: f.Seq
    buffers: Sequence[Buffer] = field(repr=False, default=())


@message(67)
class TakeState(Request):
    """Give me part ``part`` of hand-over ``number``, which has been kept for me."""

    remembered = False
    number: f.Seq
    part: f.Seq


@message(68)
class StatePart(Reply):
    """The part that was asked for."""

    buffers: Sequence[Buffer] = field(repr=False, default=())


@message(69)
class DropState(Request):
    """I have all that has been kept for me."""

    remembered = False


@message(51)
class Resume(Reply):
    """All have paused; the next push of ``ids[i]`` follows round ``clocks[i]``. Worker ``last`` has pushed most."""

    last: Annotated[int, f.integer(0, MAX_NODES)]
    clocks: f.Clocks


@message(49, parallel=("ids", "names", "shapes", "dtypes"))
class PutStates(Request):
    """Replace the optimizer's states by these; see ``OptimizerStates``."""

    store: f.Store
    ids: f.Owners
    names: f.Names
    shapes: f.Shapes
    dtypes: f.Dtypes
    buffers: Sequence[Buffer] = field(repr=False)


Loan = Annotated[int, f.integer(1)]
# ---- memory of devices, between the workers of a host and its aggregator

MAX_LENT = 1 << 40  # bytes
# Fields of either push.
_OF_VALUES = ("store", "ids", "clocks", "want", "lr", "rescale", "changes", "priority", "in_float32", "weight")


@message(170)
class Lend(Request):
    """Read this memory of my device where a ``PushLent`` names the loan."""

    store: f.Store
    loan: Loan  # its number among those of this worker and store
    device: Annotated[bytes, f.raw(16)]  # device, opaque, offset, nbytes: see ``kvstore.devices.Handle``
    opaque: Annotated[bytes, f.raw(64)]
    offset: Annotated[int, f.integer(0, MAX_LENT)]
    nbytes: Annotated[int, f.integer(1, MAX_LENT)]


@message(171)
class Borrowed(Reply):
    """The memory can be read here; or it cannot, for the reason that ``refusal`` has."""

    refusal: f.Text = ""


@message(172, parallel=("ids", "clocks"))
class PushLent(Request):
    """A ``Push`` to an aggregator, of plain values that are in the memory of ``loan``, from its beginning.

    What it asks for comes back plain.
    """

    store: f.Store
    loan: Loan
    ids: f.Ids
    clocks: f.Clocks
    want: Annotated[bool, f.flag]
    lr: f.Number
    rescale: f.Number
    changes: f.Changes = field(default_factory=list)
    priority: f.Priority = None
    weight: f.Weight = None
    in_float32: Annotated[bool, f.flag] = False

    @classmethod
    def of(cls, push: Push, loan: int) -> PushLent:
        return cls(push.sender, loan=loan, **_described(push))

    def plain(self, buffers: Sequence[Buffer] = ()) -> Push:
        return Push(self.sender, buffers=buffers, **_described(self))


def _described(push: Push | PushLent) -> dict[str, Any]:
    """Return what a push says of its values, wherever they are."""
    return {name: getattr(push, name) for name in _OF_VALUES}
