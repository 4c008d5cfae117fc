"""What members and the scheduler say to each other: joining, beating, keys, barriers, leaving."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from kvstore.errors import WireError
from kvstore.job.curve_keys import LENGTH
from kvstore.spec import MAX_ELEMENTS, MAX_SEGMENTS
from kvstore.wire import fields as f
from kvstore.wire.frames import message
from kvstore.wire.messages import (
    MAX_NODES,
    Dtypes,
    Ids,
    Keys,
    Kinds,
    Message,
    NodeField,
    Rank,
    Reply,
    Request,
    Role,
    Seq,
    Shapes,
    Store,
    Text,
    require_known,
    same_length,
)

Elements = Annotated[list[int], f.integers(0, MAX_ELEMENTS)]


@message(10)
@dataclass(frozen=True)
class Join(Request):
    """Let me in: ``incarnation`` is a random number until the answer gives the real one; ``rank`` is a wish."""

    address: Annotated[str, f.text(512)]


@message(11)
@dataclass(frozen=True)
class Welcome(Reply):
    """All are here: your rank and incarnation, and the servers' addresses in the order of their ranks.

    Servers are told the public keys that the workers have proved, by rank; none where nothing is proved.
    """

    rank: Rank
    incarnation: Seq
    num_workers: Annotated[int, f.integer(1, MAX_NODES)]
    servers: Annotated[list[str], f.list_of(f.text(512), MAX_NODES)]
    worker_keys: Annotated[list[str], f.list_of(f.text(LENGTH), MAX_NODES)] = field(default_factory=list)


@dataclass(frozen=True)
class MemberNotice(Message):
    """A notice about one member. Its sender does not wait for an answer."""

    node: NodeField


@message(12)
@dataclass(frozen=True)
class Beat(MemberNotice):
    """I am alive."""


@message(26)
@dataclass(frozen=True)
class ProcessAlive(MemberNotice):
    """The member's process is alive. A process beside it sends this, and gets no answer."""


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
    """These keys exist: place them (rank 0), or wait until their values are there.

    The array of ``keys[i]`` has the shape and dtype number ``kinds[i]``. Arrays of ``bound`` elements or more are cut
    across servers, into segments of at most ``longest`` bytes; rank 0's word counts.
    """

    store: Store
    keys: Keys
    kinds: Kinds
    shapes: Shapes
    dtypes: Dtypes
    bound: Annotated[int, f.integer(1)]
    longest: Annotated[int, f.integer(1)]

    def __post_init__(self) -> None:
        same_length(self.keys, self.kinds)
        same_length(self.shapes, self.dtypes)
        require_known(self.kinds, self.shapes)


@message(16)
@dataclass(frozen=True)
class Placed(Reply):
    """How many segments each key has; and, for all of them, the id, the server, and which elements of the array."""

    counts: Annotated[list[int], f.integers(1, MAX_SEGMENTS)]
    ids: Ids
    servers: Annotated[list[int], f.integers(0, MAX_NODES)]
    starts: Elements
    stops: Elements

    def __post_init__(self) -> None:
        same_length(self.ids, self.servers, self.starts, self.stops)
        if sum(self.counts) != len(self.ids):
            raise WireError(f"{len(self.ids)} segments, where {sum(self.counts)} are announced")


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


@message(21)
@dataclass(frozen=True)
class OpenStore(Request):
    """I make my ``ordinal``-th store: which number has it? The n-th stores of all workers are one."""

    ordinal: Annotated[int, f.integer(1)]


@message(22)
@dataclass(frozen=True)
class StoreOpened(Reply):
    """This one; it is given again when all workers have closed the store."""

    store: Store


@message(23)
@dataclass(frozen=True)
class CloseStore(Request):
    """I do not use ``store`` any more."""

    store: Store


@message(24)
@dataclass(frozen=True)
class Here(MemberNotice):
    """The link belongs to the member. A member that has a rank sends it first over each link that it makes."""


# ---- notices


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
