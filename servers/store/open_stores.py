"""The open stores of one server, which workers have opened and closed them, and the records of a standby. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any, NamedTuple

from kvstore import wire
from kvstore.errors import UsageError
from kvstore.job.contract import first_left
from kvstore.rows.slab_space import GrownTables
from kvstore.rule import Rule
from kvstore.tracer import Tracer
from kvstore.transport.memory import Memory
from servers.activity import ServedActivity, together
from servers.names import have, name
from servers.requests.openers import Openers
from servers.requests.reasons import Reason
from servers.requests.replies import Answer
from servers.store.first_sums import FirstSums
from servers.store.grace import Grace
from servers.store.lateness import ArrivalTimes
from servers.store.optimizer_agreement import OptimizerAgreement
from servers.store.recording import Recorder, Recording, grouped_record
from servers.store.served_store import ServedStore
from servers.store.snapshot import restore, restore_table, snapshot, table_snapshot


class ServedStores:
    """The open stores; ``recorder`` is told of each change, and is None without a standby.

    Of ``workers`` all but the first ``number`` are added while the job runs; None if none is.
    """

    def __init__(
        self, rank: int, workers: Collection[int], memory: Memory, times: ArrivalTimes, number: int | None = None
    ) -> None:
        self.open: dict[int, ServedStore] = {}
        self.recorder: Recorder | None = None
        self.grown = GrownTables()
        self.elastic = False  # whether the job goes on without workers that are lost, worker 0 too
        self._graces: list[Grace] = []  # of the open stores that have one: ``due`` is asked before each message
        self._tracer: Tracer | None = None
        self._rank = rank
        self._workers = workers
        self._number = len(workers) if number is None else number
        self._memory = memory
        self._times = times
        self._openers = Openers(workers)
        self._agreements: dict[int, OptimizerAgreement] = {}
        self._departed: Collection[int] = ()
        self._losses: Mapping[int, int] = {}  # by rank, the incarnation that was lost last
        # By rank, the incarnation that was started last, of those started again or added; and their public keys.
        self._came: Mapping[int, int] = {}
        self._keys: Mapping[int, str] = {}
        self._bypassed: list[int] = []  # the aggregators that are lost
        self._admitted: dict[int, int] = {}  # by rank, the incarnation that another worker has let in
        self.admits: Callable[[int, int], object] = lambda *_: None  # called before one is let in

    def due(self) -> float | None:
        """Return when ``tick`` has something to do; None if nothing waits for the time."""
        if not self._graces:
            return None
        return min((grace.due for grace in self._graces if grace.due is not None), default=None)

    def tick(self) -> list[Answer]:
        return [answer for served in self.open.values() for answer in served.tick()]

    def record(self, recorder: Recorder | None) -> None:
        self.recorder = recorder
        for served in self.open.values():
            served.recording.use(recorder)

    def trace(self, tracer: Tracer) -> None:
        """Trace updates with ``tracer`` from now on."""
        self._tracer = tracer
        for served in list(self.open.values()):  # the heartbeat's thread may call this
            served.tracer = tracer

    def depart(
        self, workers: Collection[int], lost: Mapping[int, int], came: Mapping[int, int], keys: Mapping[int, str]
    ) -> list[Answer]:
        """Go on without ``workers``, which have left in order, and those that are ``lost``: all until now.

        ``lost`` and ``came``, which were started again or added, are by rank, with their incarnations.
        """
        self._departed, self._losses, self._came, self._keys = workers, lost, came, keys
        if self.recorder is not None:
            self.recorder.note(self._roster())
        answers = [answer for served in self.open.values() for answer in served.depart(workers, self._lost)]
        return (
            answers
            + self._led()
            + [answer for store in self._openers.lose(self._lost) for answer in self._forget(store)]
        )

    def bypass(self, aggregator: wire.Node, ranks: Collection[int]) -> None:
        """Go on without ``aggregator``, which has sent for the workers ``ranks``; see ``ServedStore.bypass``."""
        back = self._came.keys() | self._admitted.keys()  # have sent here themselves since they were started again
        self._bypassed.append(aggregator.rank)
        if self.recorder is not None:
            self.recorder.note(self._roster())
        for served in self.open.values():
            served.bypass(aggregator, ranks, back)

    def _led(self) -> list[Answer]:
        """Let ``set_optimizer`` follow whoever does what one does for all."""
        answers = [answer for agreement in self._agreements.values() for answer in agreement.lead(self._first)]
        return answers + self._abandoned()

    def _roster(self) -> wire.Roster:
        return wire.Roster.of(0, self._departed, self._losses, self._came, self._keys, self._bypassed)

    @property
    def _lost(self) -> Collection[int]:
        """The workers that are lost, and those started again, or added or still to be, that nobody has let in."""
        lost = [rank for rank, death in self._losses.items() if death >= self._admitted.get(rank, 1)]
        if self._number < len(self._workers):
            # A standby need not know who has let a worker in. One that has come, and is not lost, was let in.
            seats = range(self._number, len(self._workers))
            lost += [rank for rank in seats if rank not in {*self._admitted, *self._losses, *self._came}]
        return lost

    def _admit(self, message: wire.Admit) -> list[Answer]:
        """Let a worker that was started again into the rounds of one store; in all stores it is not lost any more."""
        if not self.elastic:
            raise UsageError("workers come only to a job that goes on without those that are lost (--min-workers)")
        rank, incarnation = message.rank, message.incarnation
        served = self.require(message.store)
        self._admitted[rank] = max(incarnation, self._admitted.get(rank, 1))
        self.admits(rank, incarnation)
        if rank in self._lost or self._admitted[rank] > incarnation:
            return []  # it is lost again
        self._openers.lose(self._lost)
        return served.admit(message) + self._led()

    @property
    def _first(self) -> int:
        """The worker that does what one does for all; see ``first_left``."""
        return first_left(self._lost)

    # ---- as a standby

    def follow(self, message: wire.Message) -> list[Answer]:
        """Make a change that another server has recorded, and that no request describes; return its answers."""
        if isinstance(message, wire.StoreState):
            self._make(message.store, Rule.of(message), message.lineage)
            self._openers.opened_by[message.store] = set(message.opened_by)
            self._openers.closed_by[message.store] = set(message.closed_by)
            return []
        store: int | None = getattr(message, "store", None)
        if store is None:
            raise ValueError(f"a {type(message).__name__} is no change of a server's state")
        if store not in self.open:
            raise ValueError(f"a {type(message).__name__} of store {store}, which is not open")
        served = self.open[store]
        if isinstance(message, wire.ClosedRounds | wire.ClosedRowRounds):
            return served.follow_rounds(message)
        if isinstance(message, wire.Updated):
            return served.follow_updated(message)
        if isinstance(message, wire.VersionMade):
            served.publishing.follow(message)
        elif isinstance(message, wire.VersionState | wire.PublishedState):
            served.publishing.restore(message)
        elif isinstance(message, wire.Grouped):
            served.buckets.group(message.ids, message.sizes)
        elif isinstance(message, wire.InDoubt):
            served.buckets.follow_doubt(message.ids, message.why)
        elif isinstance(message, wire.ReadBy):
            served.values.remember(message.ids, message.ranks)
        elif isinstance(message, wire.EncodedAnswer):
            served.values.follow(message)
        elif isinstance(message, wire.OptimizerCalls):
            self._agreements[store].restore(message)
        elif isinstance(message, wire.StripeState | wire.TablePage | wire.TableRest):
            restore_table(message, served.buckets, served.tables)
        elif isinstance(message, wire.BucketState | wire.StatesState | wire.EncoderState):
            restore(message, served.buckets, served.updates, served.values)
        else:
            raise ValueError(f"a {type(message).__name__} is no change of a server's state")
        return []

    def capture(self) -> Iterator[wire.Message | Iterable[wire.Message]]:
        """Return the records that give this state to a server without one. See ``snapshot``, ``table_snapshot``."""
        # Without ``_bypassed``: that comes last, when the new server knows which pushes have counted.
        yield wire.Roster.of(0, self._departed, self._losses, self._came, self._keys)
        for store, served in self.open.items():
            openers = self._openers
            opened_by, closed_by = sorted(openers.opened_by[store]), sorted(openers.closed_by[store])
            yield wire.StoreState(store, opened_by, closed_by, **served.rule.described, lineage=served.lineage)
            agreement = self._agreements[store]
            yield agreement.record()
            yield from snapshot(store, served.buckets, served.updates, served.values)
            yield from table_snapshot(store, served.buckets)
            yield from served.pauses.requests
            # The pauses split there what has been merged here since.
            buckets = sorted(served.buckets.all(), key=lambda bucket: bucket.ids)
            yield grouped_record(store, buckets)
            yield from served.admissions
            yield from served.publishing.snapshot()
            yield from agreement.waiting
        if self._bypassed:
            yield self._roster()

    def _make(self, store: int, rule: Rule, lineage: int) -> None:
        recording = Recording(store, self.recorder, self._memory)
        served = self.open[store] = ServedStore(
            *(rule, self._workers, self._memory, recording, self._times, lineage, self._number)
        )
        served.tracer = self._tracer
        served.tables.grown = self.grown
        if self.elastic and rule.mode == "sync":
            served.first_sums = FirstSums()
        served.depart(self._departed, self._lost)
        self._look_for_graces()
        agreement = OptimizerAgreement(store, served.updates, served.set_optimizer, self._rank)
        agreement.lead(self._first)
        self._agreements[store] = agreement

    def require(self, store: int) -> ServedStore:
        served = self.open.get(store)
        if served is None:
            raise UsageError(f"store {store} is not open; send Open first")
        return served

    # ---- requests

    def serve(self, peer: bytes, message: wire.Request) -> list[Answer]:
        """Do what ``message`` asks; return the answers that need not wait any more, and record the change."""
        if isinstance(message, wire.Push):  # the most frequent kind goes first; a push is recorded with its round
            return self.require(message.store).push(peer, message)
        if isinstance(message, wire.Open):
            self._open(message)
            answers = [Answer(peer, message, wire.Ack(message.seq))]
        elif isinstance(message, wire.Close):
            answers = [Answer(peer, message, wire.Ack(message.seq)), *self._close(message)]
        elif isinstance(message, wire.Admit):
            answers = [Answer(peer, message, wire.Ack(message.seq)), *self._admit(message)]
        elif isinstance(message, wire.SetOptimizer):
            self.require(message.store)
            answers = self._agreements[message.store].take(peer, message) + self._abandoned()
        else:
            answers = self._serve(peer, message)
            if isinstance(message, wire.Pause):
                answers += self._abandoned()
        if self.recorder is not None and isinstance(message, RECORDED):
            self.recorder.note(message)
        return answers

    def _serve(self, peer: bytes, message: Any) -> list[Answer]:
        kind = KINDS.get(type(message))
        if kind is None:
            raise UsageError(f"servers do not handle a {type(message).__name__}")
        served = self.require(message.store)
        if kind.values is not None:
            served.buckets.require_sound(kind.values(message))
        if kind.zero and message.node.rank != 0 and not self.elastic:
            raise UsageError(f"only worker 0 may send {type(message).__name__}, and {message.node} did")
        done = kind.serve(served, peer, message)
        if isinstance(done, list):
            return done
        return [Answer(peer, message, wire.Ack(message.seq) if done is None else done)]

    def _open(self, message: wire.Open) -> None:
        known = self.open.get(message.store)
        rule = self._openers.open(message, None if known is None else known.rule)
        if rule is not None:
            self._make(message.store, rule, message.lineage)

    def _close(self, message: wire.Close) -> list[Answer]:
        return self._forget(message.store) if self._openers.close(message) else []

    def _forget(self, store: int) -> list[Answer]:
        wire.forget_shared()
        error = UsageError("this store has been closed by all workers")
        closed = self.open.pop(store)
        self._look_for_graces()
        return closed.close(error) + self._agreements.pop(store).abandon(error)

    def _look_for_graces(self) -> None:
        self._graces = [served.grace for served in self.open.values() if served.grace is not None]

    def _abandoned(self) -> list[Answer]:
        """Fail the calls of ``set_optimizer`` that wait for worker 0's in vain."""
        answers: list[Answer] = []
        for store, agreement in self._agreements.items():
            answers += agreement.abandon_if_vain(self._departed, self.open[store].pauses.ranks)
        return answers

    # ---- reports

    def activity(self, now: float) -> ServedActivity:
        """Return the work done in all stores, and the workers that wait. The cost does not grow with the requests."""
        rounds = held = 0
        for served in self.open.values():
            buckets, tables = served.buckets.all(), served.buckets.read_tables()
            versions = [bucket.version for bucket in buckets] + [target.table.version for target in tables]
            rounds = max(rounds, *versions) if versions else rounds
            held += sum(bucket.value.nbytes for bucket in buckets) + sum(target.table.nbytes for target in tables)
        waits = together(served.waiting.waits(now) for served in self.open.values())
        return ServedActivity(rounds, held, self._times.lateness, waits)

    def explain(self, message: wire.Explain) -> Reason:
        """Say what a request waits for; nothing if it does not wait."""
        for store, served in self.open.items():
            text, missing = served.waiting.explain(message.node, message.about)
            if text:
                return Reason(text + self._unmade(store, missing) + self._inside(), missing)
        for agreement in self._agreements.values():
            reason = agreement.explain(message.node, message.about)
            if reason.text:
                return reason
        return Reason()

    def _unmade(self, store: int, missing: Collection[int]) -> str:
        """Say which of the ``missing`` workers have not made the store: they may never do so."""
        absent = set(missing) - self._openers.opened_by[store]
        if not absent:
            return ""
        who = f"{name('worker', absent)} {have(absent)} not made this store"
        return f"; {who}: all workers must make the same stores, in the same order"

    def _inside(self) -> str:
        """Say which workers are inside ``join`` of any store: waiting for such a worker may be in vain."""
        ranks = sorted(frozenset().union(*(served.pauses.ranks for served in self.open.values())))
        return "; inside join(): " + ", ".join(f"worker {rank}" for rank in ranks) if ranks else ""


class Kind(NamedTuple):
    """How requests of one kind are served."""

    # Returns answers, the one reply to the request, or None for an ``Ack``.
    serve: Callable[[ServedStore, bytes, Any], list[Answer] | wire.Reply | None]
    values: Callable[[Any], Collection[int]] | None = None  # the segments whose values it reads or replaces at once
    zero: bool = False  # whether only worker 0 may send it; the news that another does so instead may come later
    recorded: bool = False  # whether it is recorded as it came, once it is done


_ids = attrgetter("ids")


def _id(message: wire.PutRows | wire.PutTableRest) -> Collection[int]:
    return [message.id]


KINDS: dict[type[wire.Request], Kind] = {
    wire.PushRows: Kind(ServedStore.push_rows),  # a push contributes to its round first; then it hears of doubts
    wire.Pull: Kind(ServedStore.when_due, _ids),
    wire.PullRows: Kind(ServedStore.when_due, _ids),
    wire.FreezeTable: Kind(ServedStore.when_due, _ids),
    wire.EvictRows: Kind(ServedStore.when_due, _ids, zero=True),
    wire.Pause: Kind(ServedStore.pause),
    wire.PassRounds: Kind(ServedStore.pass_rounds, recorded=True),
    wire.Init: Kind(lambda served, _, message: served.init(message), zero=True, recorded=True),
    wire.GetStates: Kind(lambda served, _, message: served.updates.get_states(message), _ids),
    wire.PutStates: Kind(lambda served, _, message: served.updates.put_states(message), _ids, True, True),
    wire.Publish: Kind(ServedStore.publish, _ids, zero=True),
    wire.InitTables: Kind(lambda served, _, message: served.tables.init(message), zero=True, recorded=True),
    wire.PutRows: Kind(lambda served, _, message: served.tables.put(message), _id, True, True),
    wire.PutTableRest: Kind(lambda served, _, message: served.tables.put_rest(message), _id, True, True),
    wire.DescribeTable: Kind(lambda served, _, message: served.tables.describe(message)),
    wire.ReadFrozen: Kind(lambda served, _, message: served.tables.freezes.read(message)),
    wire.Thaw: Kind(lambda served, _, message: served.tables.freezes.thaw(message.node, message.number)),
}
RECORDED = (
    wire.Open,
    wire.Close,
    wire.Admit,
    wire.SetOptimizer,
    *(kind for kind, how in KINDS.items() if how.recorded),
)
