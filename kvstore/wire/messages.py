"""The messages, one class each: what they say, and the check that each field must pass.

Requests carry who asks: (role, rank, incarnation), a sequence number that is theirs alone, and ``done``: every request
of that sender below it has been answered, so whoever keeps answers for repeats may forget those. Replies carry the
sequence number they answer. The rest are notices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeAlias

from kvstore.errors import WireError
from kvstore.wire import fields as f
from kvstore.wire.frames import Buffer, message

MAX_NODES = 4096

Role = Annotated[str, f.choice("worker", "server", "scheduler", "launcher")]
Rank = Annotated[int, f.integer(-1, MAX_NODES)]
Seq = Annotated[int, f.integer()]
Store = Annotated[int, f.integer(0, 255)]
Text = Annotated[str, f.text()]
Keys = Annotated[list[Any], f.list_of(f.key)]
Ids = Annotated[list[int], f.ids]
Clocks = Annotated[list[int], f.clocks]
Dtypes = Annotated[list[str], f.list_of(f.dtype)]
Shapes = Annotated[list[list[int]], f.list_of(f.shape)]
Number = Annotated["float | None", f.optional(f.number)]
Hyper: TypeAlias = "float | bool | str | list[float | None] | None"
Pairs = Annotated[list[list[Any]], f.list_of(f.tuple_of(f.text(64), f.hyperparameter), 64)]
Mults = Annotated[list[list[Any]], f.list_of(f.tuple_of(f.key, f.number))]


@dataclass(frozen=True)
class Node:
    """Who a member is. A process that takes a dead one's rank has a higher incarnation."""

    role: str
    rank: int
    incarnation: int

    def __str__(self) -> str:
        return self.role if self.role == "scheduler" else f"{self.role} {self.rank}"


@dataclass(frozen=True)
class Message:
    """The root of all messages."""


@dataclass(frozen=True)
class Request(Message):
    """Wants an answer."""

    role: Role
    rank: Rank
    incarnation: Seq
    seq: Seq
    done: Seq

    @property
    def node(self) -> Node:
        """Who asks."""
        return Node(self.role, self.rank, self.incarnation)


@dataclass(frozen=True)
class Reply(Message):
    """Answers the request ``seq``."""

    seq: Seq


# ---- replies that any member gives


@message(1)
@dataclass(frozen=True)
class Ack(Reply):
    """It is done."""


@message(2)
@dataclass(frozen=True)
class Failure(Reply):
    """It was refused or went wrong; ``kind`` names a class of ``kvstore.errors``."""

    kind: Annotated[str, f.text(64)]
    text: Text


@message(3)
@dataclass(frozen=True)
class Explain(Request):
    """What does my request ``about`` wait for?"""

    about: Seq


@message(4)
@dataclass(frozen=True)
class Explanation(Reply):
    """It waits for that, in words; empty when it is not known here."""

    text: Text


# ---- to the scheduler


@message(10)
@dataclass(frozen=True)
class Join(Request):
    """Let me in: ``incarnation`` is a random number until the answer gives the real one; ``rank`` is a wish."""

    address: Annotated[str, f.text(512)]


@message(11)
@dataclass(frozen=True)
class Welcome(Reply):
    """All are here: your rank and incarnation, and the servers' addresses in the order of their ranks."""

    rank: Rank
    incarnation: Seq
    num_workers: Annotated[int, f.integer(1, MAX_NODES)]
    servers: Annotated[list[str], f.list_of(f.text(512), MAX_NODES)]


@message(12)
@dataclass(frozen=True)
class Beat(Message):
    """I am alive."""

    role: Role
    rank: Rank
    incarnation: Seq

    @property
    def node(self) -> Node:
        """Who is."""
        return Node(self.role, self.rank, self.incarnation)


@message(13)
@dataclass(frozen=True)
class Leave(Request):
    """I am going, in order, or because of ``error``."""

    error: Annotated[str | None, f.optional(f.text())]


@message(14)
@dataclass(frozen=True)
class Lost(Message):
    """From the launcher: the process of ``role`` and ``rank`` has ended; ``how`` in words."""

    role: Role
    rank: Rank
    how: Text


@message(15)
@dataclass(frozen=True)
class Declare(Request):
    """These keys exist, with these shapes and dtypes: place them (rank 0), or wait until their values are there.

    Arrays of ``bound`` elements or more are cut; rank 0's word counts.
    """

    store: Store
    keys: Keys
    shapes: Shapes
    dtypes: Dtypes
    bound: Annotated[int, f.integer(1)]

    def __post_init__(self) -> None:
        same_length(self.keys, self.shapes, self.dtypes)


@message(16)
@dataclass(frozen=True)
class Placed(Reply):
    """For each key its segments, as ``[id, server, start, stop]``."""

    segments: Annotated[
        list[list[list[int]]],
        f.list_of(f.list_of(f.tuple_of(f.integer(), f.integer(0, MAX_NODES), f.integer(), f.integer()), MAX_NODES)),
    ]


@message(17)
@dataclass(frozen=True)
class Ready(Request):
    """From rank 0: the values of these keys are on the servers."""

    store: Store
    keys: Keys


@message(18)
@dataclass(frozen=True)
class Barrier(Request):
    """I have come to this store's barrier ``number``."""

    store: Store
    number: Seq


@message(19)
@dataclass(frozen=True)
class Census(Request):
    """How many members are lost?"""


@message(20)
@dataclass(frozen=True)
class Counted(Reply):
    """So many."""

    count: Annotated[int, f.integer()]


# ---- notices of the scheduler


@message(30)
@dataclass(frozen=True)
class Alive(Message):
    """I have heard you, and am alive too."""


@message(31)
@dataclass(frozen=True)
class JobFailed(Message):
    """The job cannot go on; ``text`` names who failed and how."""

    text: Text


@message(32)
@dataclass(frozen=True)
class Roster(Message):
    """Who is still there: ``epoch`` grows with every change, ``departed`` are the workers that have left in order."""

    epoch: Seq
    departed: Annotated[list[int], f.list_of(f.integer(0, MAX_NODES), MAX_NODES)]


@message(33)
@dataclass(frozen=True)
class Fault(Message):
    """Something that an earlier, answered call of yours has to do with went wrong."""

    store: Store
    kind: Annotated[str, f.text(64)]
    text: Text


@message(34)
@dataclass(frozen=True)
class Stop(Message):
    """To servers: the workers are done; end."""


# ---- to servers


@message(40)
@dataclass(frozen=True)
class Open(Request):
    """I use ``store``, and it is of this mode."""

    store: Store
    mode: Annotated[str, f.choice("sync", "async")]


@message(41)
@dataclass(frozen=True)
class Init(Request):
    """From rank 0: new segments with their first values; ``shapes`` are those of the segments."""

    store: Store
    ids: Ids
    keys: Keys
    shapes: Shapes
    dtypes: Dtypes
    buffers: Sequence[Buffer] = field(repr=False)

    def __post_init__(self) -> None:
        same_length(self.ids, self.keys, self.shapes, self.dtypes)


@message(42)
@dataclass(frozen=True)
class Push(Request):
    """My contribution ``clocks[i]`` to segment ``ids[i]``; ``want`` the values back once it has taken effect.

    ``lr`` and ``rescale`` are the hyper-parameters to update with, from this round on; None leaves them.
    """

    store: Store
    ids: Ids
    clocks: Clocks
    want: Annotated[bool, f.flag]
    lr: Number
    rescale: Number
    buffers: Sequence[Buffer] = field(repr=False)

    def __post_init__(self) -> None:
        same_length(self.ids, self.clocks)


@message(43)
@dataclass(frozen=True)
class Pull(Request):
    """The values of segments ``ids``, once they include contribution ``clocks[i]`` of every worker (sync)."""

    store: Store
    ids: Ids
    clocks: Clocks

    def __post_init__(self) -> None:
        same_length(self.ids, self.clocks)


@message(44)
@dataclass(frozen=True)
class Values(Reply):
    """The values of the segments that were asked for, in that order."""

    buffers: Sequence[Buffer] = field(repr=False)


@message(45)
@dataclass(frozen=True)
class SetOptimizer(Request):
    """Update with this optimizer: ``version`` counts the calls of ``set_optimizer`` on this worker."""

    store: Store
    version: Seq
    name: Annotated[str, f.text(64)]
    hyper: Pairs
    clip_gradient: Number
    lr_mult: Mults
    wd_mult: Mults
    lr: Number
    rescale: Number


@message(47)
@dataclass(frozen=True)
class GetStates(Request):
    """The optimizer's states of these segments; without ids, just whether there is an optimizer."""

    store: Store
    ids: Ids


@message(48)
@dataclass(frozen=True)
class States(Reply):
    """For each tensor of state: the segment it belongs to, its name, shape and dtype."""

    optimizer: Annotated[str | None, f.optional(f.text(64))]
    ids: Annotated[list[int], f.list_of(f.integer(0, 2**32))]
    names: Annotated[list[str], f.list_of(f.text(64))]
    shapes: Shapes
    dtypes: Dtypes
    buffers: Sequence[Buffer] = field(repr=False)

    def __post_init__(self) -> None:
        same_length(self.ids, self.names, self.shapes, self.dtypes)


@message(49)
@dataclass(frozen=True)
class PutStates(Request):
    """Take these as the optimizer's states."""

    store: Store
    ids: Annotated[list[int], f.list_of(f.integer(0, 2**32))]
    names: Annotated[list[str], f.list_of(f.text(64))]
    shapes: Shapes
    dtypes: Dtypes
    buffers: Sequence[Buffer] = field(repr=False)

    def __post_init__(self) -> None:
        same_length(self.ids, self.names, self.shapes, self.dtypes)


def same_length(*lists: Sequence[Any]) -> None:
    """Raise ``WireError`` unless all ``lists``, which describe the same things, have one length."""
    if len({len(items) for items in lists}) > 1:
        raise WireError(f"lists of different lengths: {', '.join(str(len(items)) for items in lists)}")
