"""Members and the scheduler: joining, heartbeats, keys, barriers, leaving; which process serves a server's rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from typing import Annotated, Any

from kvstore.errors import WireError
from kvstore.job.curve_keys import LENGTH
from kvstore.job.settings import MAX_NODES
from kvstore.spec import MAX_ELEMENTS, MAX_SEGMENTS
from kvstore.wire import fields as f
from kvstore.wire.coding import frozen, message
from kvstore.wire.message import (
    Message,
    NodeField,
    Reply,
    Request,
    require_known,
)
from kvstore.wire.rows import (
    MaybeTables,
)

Elements = Annotated[list[int], f.integers(0, MAX_ELEMENTS)]
PublicKeys = Annotated[list[str], f.list_of(f.text(LENGTH), MAX_NODES)]
Start = Annotated[int, f.integer(1)]  # how often a member's process has been started
Incarnations = Annotated[list[int], f.integers()]
State = Annotated[str, f.text(1 << 22)]  # JSON that only workers read


def require_counted(counts: Sequence[int], ids: Sequence[int]) -> None:
    """Raise ``WireError`` unless ``ids`` are as many segments as ``counts``, of each key, say."""
    if sum(counts) != len(ids):
        raise WireError(f"expected {sum(counts)} segments, as ``counts`` says, got {len(ids)}")


@message(10)
class Join(Request):
    """Let me in. Until the answer gives both, my ``rank`` is a wish, and my ``incarnation`` a random number."""

    address: Annotated[str, f.text(512)]  # where other members reach me; empty for workers
    aggregator: f.Rank = -1  # of a worker, the rank of the aggregator that speaks for it; -1 for none
    start: Start = 1  # how often this member's process has been started, 1 for the first time; its incarnation
    host: f.Host = ""  # host, pid: where the process runs, for observers; empty and 0 if it does not say
    pid: f.Pid = 0


@message(11)
class Welcome(Reply):
    """All members have joined: your rank and incarnation."""

    rank: f.Rank
    incarnation: f.Seq
    num_workers: Annotated[int, f.integer(1, MAX_NODES)]
    servers: Annotated[list[str], f.list_of(f.text(512), MAX_NODES)]  # their addresses, by rank
    # to servers and aggregators, the public keys that the workers' links have proved, by rank; empty where none are. An
    # aggregator is told those of its own workers; the others are empty.
    worker_keys: PublicKeys = field(default_factory=list)
    # to a worker, the address of the aggregator that speaks for it; empty for none
    aggregator: Annotated[str, f.text(512)] = ""
    # to servers, for each aggregator the ranks of the workers that it speaks for; to an aggregator, its own alone
    aggregated: Annotated[list[list[int]], f.list_of(f.rising(0, MAX_NODES), MAX_NODES)] = field(default_factory=list)
    # to servers, the aggregators' public keys; see ``worker_keys``
    aggregator_keys: PublicKeys = field(default_factory=list)


@frozen
class MemberNotice(Message):
    """A notice of a member, or of a process beside it; it is not answered."""

    node: NodeField


@message(12)
class Beat(MemberNotice):
    """The member is alive, and its heartbeat runs. The scheduler says ``Alive`` in return."""

    # when, by the member's monotonic clock; 0 if it does not ask for the scheduler's time
    sent: Annotated[float, f.number] = 0.0


@message(26)
class ProcessAlive(MemberNotice):
    """The member's process is alive, says a process beside it."""


@message(13)
class Leave(Request):
    """I leave: in order, or because of ``error``."""

    error: Annotated[str | None, f.optional(f.text())]


@message(14)
class Lost(Message):
    """From the launcher: the process of ``role`` and ``rank`` has ended; ``how``, in words."""

    role: f.Role
    rank: f.Rank
    how: f.Text
    start: f.Seq = 0  # which of that member's processes, see ``Join``; 0 for the latest
    final: Annotated[bool, f.flag] = False  # whether it is not started again


@message(5)
class Retire(Message):
    """From the launcher: this server or standby shall end in order as soon as its partner can serve alone."""

    role: f.Role
    rank: f.Rank
    start: f.Seq  # which of that member's processes, see ``Join``


@message(15)
class Declare(Request):
    """From rank 0: place these keys. From other workers: answer when their values are on the servers."""

    store: f.Store
    keys: f.Keys
    kinds: f.Kinds  # the array of ``keys[i]`` has the ``kinds[i]``-th of ``shapes`` and ``dtypes``
    shapes: f.Shapes
    dtypes: f.Dtypes
    bound: Annotated[int, f.integer(1)]  # arrays of so many elements or more are divided over servers; rank 0's counts
    longest: Annotated[int, f.integer(1)]  # of a segment, in bytes; rank 0's counts
    # for each of ``shapes``, the table that it is; none, or no list at all, for an array. See
    # ``kvstore.table.Table.described``.
    tables: MaybeTables = field(default_factory=list)

    def __post_init__(self) -> None:
        f.same_length(self.keys, self.kinds)
        f.same_length(self.shapes, self.dtypes)
        if self.tables:
            f.same_length(self.shapes, self.tables)
        require_known(self.kinds, self.shapes)


@message(16)
class Placed(Reply):
    """The number of segments of each key; and for each segment its id, its server, and its range of the array.

    ``first``: the asker is to give the keys their first values, since worker 0 is lost.
    """

    counts: Annotated[list[int], f.integers(1, MAX_SEGMENTS)]
    ids: f.Ids
    servers: Annotated[list[int], f.integers(0, MAX_NODES)]
    starts: Elements
    stops: Elements
    first: Annotated[bool, f.flag] = False

    def __post_init__(self) -> None:
        f.same_length(self.ids, self.servers, self.starts, self.stops)
        require_counted(self.counts, self.ids)


@message(27)
class Describe(Request):
    """To an aggregator: these are keys, and where their segments are; see ``Declare`` and ``Placed``."""

    store: f.Store
    keys: f.Keys
    kinds: f.Kinds  # the array of ``keys[i]`` has the ``kinds[i]``-th of ``shapes`` and ``dtypes``
    shapes: f.Shapes
    dtypes: f.Dtypes
    counts: Annotated[list[int], f.integers(1, MAX_SEGMENTS)]  # the number of segments of each key
    ids: f.Ids  # ids, servers, sizes: of each segment
    servers: Annotated[list[int], f.integers(0, MAX_NODES)]
    sizes: Elements

    def __post_init__(self) -> None:
        f.same_length(self.keys, self.kinds, self.counts)
        f.same_length(self.shapes, self.dtypes)
        f.same_length(self.ids, self.servers, self.sizes)
        require_known(self.kinds, self.shapes)
        require_counted(self.counts, self.ids)


@message(17)
class Ready(Request):
    """From rank 0: the values of these keys are on the servers."""

    store: f.Store
    keys: f.Keys


@message(18)
class Barrier(Request):
    """I have come to barrier ``number`` of this store."""

    store: f.Store
    number: f.Seq


@message(25)
class Enter(Request):
    """I have been started again: let me in before you push segment ``id`` of ``store``, as I am about to do."""

    store: f.Store
    id: Annotated[int, f.integer(-1)]  # -1 to be let in between two steps, wherever that is


@message(59)
class Entered(Reply):
    """You are in. What the worker that has let you in knows: see ``Admitted``."""

    stores: Annotated[list[int], f.integers()]
    barriers: Annotated[list[int], f.integers()]
    joins: Annotated[list[int], f.integers()]
    counts: Annotated[list[int], f.integers()]
    ids: f.Owners
    clocks: f.Clocks
    state: State

    def __post_init__(self) -> None:
        f.same_length(self.stores, self.barriers, self.joins, self.counts)
        f.same_length(self.ids, self.clocks)
        require_counted(self.counts, self.ids)


@message(57)
class Admitted(Request):
    """All servers know that ``rank`` is in the rounds after those that I have pushed."""

    rank: f.Rank
    incarnation: f.Seq
    # stores, barriers, joins, counts: of each of my stores how many barriers and joins I have passed, and how many keys
    # it has
    stores: Annotated[list[int], f.integers()]
    barriers: Annotated[list[int], f.integers()]
    joins: Annotated[list[int], f.integers()]
    counts: Annotated[list[int], f.integers()]
    ids: f.Owners  # the first segment of each key
    clocks: f.Clocks  # how often I have pushed it
    state: State  # what else it must know to go on as I do

    def __post_init__(self) -> None:
        f.same_length(self.stores, self.barriers, self.joins, self.counts)
        f.same_length(self.ids, self.clocks)
        require_counted(self.counts, self.ids)


GIVEN_UP = "was given up, and the job goes on without it"  # behind the name of a worker, in a ``NodeLost``


@message(64)
class AwaitWorkers(Request):
    """Fewer workers than the job needs are in, and others wait for my next push: answer when I shall go on."""


@message(65)
class GoOn(Reply):
    """Go on: enough workers are in (``rank`` -1), or this one waits for you; see ``Newcomer``."""

    rank: Annotated[int, f.integer(-1)] = -1
    incarnation: f.Seq = 0
    store: f.Store = 0
    id: Annotated[int, f.integer(-1)] = -1


@message(62)
class TakeShare(Request):
    """Give me up to ``most`` samples of an epoch of ``data``, or say whether it is over; see ``kvstore.shares``."""

    data: Annotated[str, f.text(256)]
    epoch: f.Seq
    size: f.Seq
    most: f.Seq
    used: f.Seq
    passes: f.Seq


@message(63)
class ShareTaken(Reply):
    """Samples ``first`` to ``end`` are yours; see ``kvstore.shares``."""

    first: f.Seq
    end: f.Seq
    over: Annotated[bool, f.flag]


@message(19)
class Census(Request):
    """How many members are lost?"""


@message(20)
class Counted(Reply):
    """So many members are lost."""

    count: Annotated[int, f.integer()]


@message(21)
class OpenStore(Request):
    """I make my ``ordinal``-th store: what is its number? The n-th stores of all workers are the same store."""

    ordinal: Annotated[int, f.integer(1)]
    # what it is, and what makes it, which must be the same on all workers; empty if it does not matter
    made: Annotated[str, f.text()] = ""
    place: Annotated[str, f.text()] = ""  # where in my program, for messages
    name: Annotated[str, f.text()] = ""  # by which readers find it; empty if they do not


@message(22)
class StoreOpened(Reply):
    """The store has this number, which is used again when all workers have closed the store."""

    store: f.Store


@message(23)
class CloseStore(Request):
    """I do not use ``store`` any more."""

    store: f.Store


@message(24)
class Here(MemberNotice):
    """This link is the member's. A member that has a rank sends this first over each link that it makes."""

    bypassed: f.Rank = -1  # of a worker whose host's aggregator is lost: which one; it sends to the servers itself


# ---- notices of the scheduler


@message(30)
class Alive(Message):
    """I have heard you, and am alive, too."""

    sent: Annotated[float, f.number] = 0.0  # of the beat that this answers
    # the scheduler's time when it answers, by its monotonic clock; 0 if it was not asked for
    now: Annotated[float, f.number] = 0.0
    # how often the scheduler has been started: each process may have another clock
    start: Annotated[int, f.integer(1)] = 1
    # the first and the last round to note for the job's trace; both 0 if nobody has asked for one
    traced: f.TracedRounds = field(default_factory=lambda: [0, 0])


@message(31)
class JobFailed(Message):
    """The job has failed; ``text`` says who failed, and how. ``cause`` is that of ``NodeLost``."""

    text: f.Text
    cause: Annotated[str, f.text(64)] = ""


@message(39)
class Newcomer(Message):
    """To one worker: let ``rank`` in before your next push that begins with segment ``id`` of ``store``."""

    rank: f.Rank
    incarnation: f.Seq
    store: f.Store
    id: Annotated[int, f.integer(-1)]  # -1 for the time between two steps, wherever that is


@message(32)
class Roster(Message):
    """Which workers have left in order (``departed``), and which are ``lost``. ``epoch`` grows with every change.

    ``came`` are the workers that were started again, or were added. Each of them counts as lost until another worker
    lets it in. The workers of lost ``aggregators`` send to the servers themselves. The scheduler sends this to servers
    and aggregators, and to workers once a worker or an aggregator is lost.
    """

    epoch: f.Seq
    departed: f.Ranks  # ranks of workers
    lost: f.Ranks = field(default_factory=list)  # likewise; the job goes on without them
    deaths: Incarnations = field(default_factory=list)  # of each that is lost, the incarnation that was lost last
    came: f.Ranks = field(default_factory=list)  # ranks of workers, too
    starts: Incarnations = field(default_factory=list)  # the incarnation of each of them
    worker_keys: PublicKeys = field(default_factory=list)  # likewise the public key; empty where links prove none
    aggregators: f.Ranks = field(default_factory=list)  # that are lost; the job goes on without them

    def __post_init__(self) -> None:
        f.same_length(self.lost, self.deaths)
        f.same_length(self.came, self.starts)
        if self.worker_keys:
            f.same_length(self.came, self.worker_keys)

    @classmethod
    def of(
        cls,
        epoch: int,
        departed: Iterable[int],
        losses: Mapping[int, int],
        newcomers: Mapping[int, int],
        keys: Mapping[int, str],
        aggregators: Iterable[int] = (),
    ) -> Roster:
        """Return the one that says so; ``losses`` and ``newcomers`` are incarnations, by rank."""
        lost, came = dict(sorted(losses.items())), dict(sorted(newcomers.items()))
        proved = [keys.get(rank, "") for rank in came]
        return cls(
            *(epoch, sorted(departed), list(lost), list(lost.values()), list(came), list(came.values())),
            proved if any(proved) else [],
            sorted(aggregators),
        )

    @property
    def told(self) -> tuple[list[int], dict[int, int], dict[int, int], dict[int, str], list[int]]:
        return (
            self.departed,
            self.losses,
            self.newcomers,
            dict(zip(self.came, self.worker_keys, strict=bool(self.worker_keys))),
            self.aggregators,
        )

    @property
    def losses(self) -> dict[int, int]:
        """By rank, the incarnation of each lost worker."""
        return dict(zip(self.lost, self.deaths, strict=True))

    @property
    def newcomers(self) -> dict[int, int]:
        """By rank, the incarnation of each worker that has been started again."""
        return dict(zip(self.came, self.starts, strict=True))


@message(33)
class Fault(Message):
    """A call of yours that was answered before contradicts another worker's; ``kind`` names the error's class."""

    store: f.Store
    kind: Annotated[str, f.text(64)]
    text: f.Text
    number: f.Seq = 0  # grows from fault to fault. A scheduler that has been started again tells all faults again.


@message(28)
class Stuck(MemberNotice):
    """All threads of this worker that could go on wait for other workers' calls."""

    # the number of the latest ``StillStuck`` that came before the worker asked what its calls wait for
    prompt: Annotated[int, f.integer()]
    # a number for each wait, which no other wait of the worker has; none if the worker waits no more
    waits: Annotated[list[int], f.integers()]
    missing: f.Ranks  # the workers that these calls wait for. Each call ends only when some of them go on.
    text: f.Text  # which calls, where, and what they wait for, in words


@message(29)
class StillStuck(Message):
    """To a worker that has said ``Stuck``: ask once more what your calls wait for, and say it again."""

    number: f.Seq


@message(38)
class Deadlock(Message):
    """To a worker that is ``Stuck``: these waits never end, for ``text``."""

    waits: Annotated[list[int], f.integers()]
    text: f.Text


@message(34)
class Stop(Message):
    """To servers and aggregators: all workers have left; end."""


Address = Annotated[str, f.text(512)]
Key = Annotated[str, f.text(LENGTH)]  # public
Seat = Annotated["list[Any] | None", f.optional(f.tuple_of(f.choice("server", "standby"), f.integer(1)))]

# ---- views: which process serves a rank of servers, and which one would take over


@message(35)
class View(Message):
    """To the members that hold a server's rank, ``primary.rank``: who serves it from now on."""

    primary: NodeField  # the member that serves workers
    epoch: f.Seq  # grows with every change of the view
    primary_key: Key = ""  # the public key that the primary has joined with; empty where links prove none
    # the role and start of the member that takes over when the primary is lost; None if there is none
    standby: Seat = None
    standby_address: Address = ""  # standby_address, standby_key: of the standby; empty if there is none
    standby_key: Key = ""
    synced: Annotated[bool, f.flag] = False  # whether the standby has the primary's state, so that it can take over


@message(36)
class Moved(Message):
    """To workers and aggregators: server ``rank`` is at ``address`` from now on."""

    rank: f.Rank
    epoch: f.Seq
    address: Address


@message(37)
class Standing(MemberNotice):
    """From a primary to the scheduler, regularly: it serves its rank."""

    epoch: f.Seq  # of the view that it serves in
    rounds: f.Seq  # the highest number of rounds that are over of any segment
    # whether its standby has all that it has, so that it answers nobody before the standby has it
    synced: Annotated[bool, f.flag]
    nbytes: f.Seq = 0  # how much has been sent to the standby to bring it into step; 0 if that is not known
