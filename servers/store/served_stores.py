"""The open stores of one server: which there are, who has opened and closed them, and what a standby is told. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import TypeAlias

from kvstore import wire
from kvstore.errors import Mismatch, UsageError
from kvstore.rule import Rule
from kvstore.tracer import Tracer
from kvstore.transport.memory import Memory
from servers.activity import ServedActivity, together
from servers.names import have, name
from servers.requests.reasons import Reason
from servers.requests.replies import Answer
from servers.store.lateness import ArrivalTimes
from servers.store.optimizer_agreement import OptimizerAgreement
from servers.store.recording import Recorder, Recording, grouped_record
from servers.store.served_store import ServedStore
from servers.store.snapshot import restore, restore_table, snapshot, table_snapshot

OfWorkerZero: TypeAlias = wire.InitTables | wire.PutRows | wire.PutTableRest | wire.EvictRows
RowRequest: TypeAlias = (
    wire.PushRows | wire.PullRows | wire.FreezeTable | wire.ReadFrozen | wire.Thaw | wire.DescribeTable | OfWorkerZero
)
SERVED: TypeAlias = (
    wire.Init | wire.Pull | wire.Pause | wire.SetOptimizer | wire.GetStates | wire.PutStates | RowRequest
)
OF_VALUES = (
    wire.Pull,
    wire.PullRows,
    wire.FreezeTable,
    wire.EvictRows,
    wire.GetStates,
    wire.PutStates,
)  # a push contributes to its round first
WHOLE = (
    wire.Open,
    wire.Close,
    wire.Init,
    wire.InitTables,
    wire.PutRows,
    wire.PutTableRest,
    wire.SetOptimizer,
    wire.PutStates,
)  # what is recorded as it came, once it is done


class ServedStores:
    """The open stores.

    Args:
        rank: of the server, for messages.
        workers: the ranks of the job's workers.
        memory: for values and sums.
        times: when pushes come.

    Attributes:
        open: the stores, by number.
        recorder: is told of each change; None if there is no standby. See ``record``.
    """

    def __init__(self, rank: int, workers: Collection[int], memory: Memory, times: ArrivalTimes) -> None:
        self.open: dict[int, ServedStore] = {}
        self.recorder: Recorder | None = None
        self._tracer: Tracer | None = None
        self._rank = rank
        self._workers = workers
        self._memory = memory
        self._times = times
        self._opened_by: dict[int, set[int]] = {}
        self._closed_by: dict[int, set[int]] = {}
        self._agreements: dict[int, OptimizerAgreement] = {}
        self._departed: Collection[int] = ()

    def record(self, recorder: Recorder | None) -> None:
        """Tell ``recorder`` of each change from now on."""
        self.recorder = recorder
        for served in self.open.values():
            served.recording.use(recorder)

    def trace(self, tracer: Tracer) -> None:
        """Note updates with ``tracer`` from now on."""
        self._tracer = tracer
        for served in list(self.open.values()):  # the heartbeat's thread may call this
            served.tracer = tracer

    def depart(self, workers: Collection[int]) -> list[Answer]:
        """Note which workers have left in order; fail the requests that wait for them."""
        if self.recorder is not None:
            self.recorder.note(wire.Roster(0, sorted(workers)))
        self._departed = workers
        return [answer for served in self.open.values() for answer in served.depart(workers)] + self._abandoned()

    # ---- as a standby

    def follow(self, message: wire.Message) -> list[Answer]:
        """Make a change that another server has recorded, which no request describes; return the answers it gives.

        Raises:
            ValueError: it does not follow from this state.
            WireError: its buffers do not fit.
        """
        if isinstance(message, wire.StoreState):
            served = self._new(message.store, Rule.of(message), message.lineage)
            self._opened_by[message.store] = set(message.opened_by)
            self._closed_by[message.store] = set(message.closed_by)
            return []
        if not isinstance(message, FOLLOWED):
            raise ValueError(f"a {type(message).__name__} is no change of a server's state")
        if message.store not in self.open:
            raise ValueError(f"a {type(message).__name__} of store {message.store}, which is not open")
        served = self.open[message.store]
        if isinstance(message, wire.ClosedRounds | wire.ClosedRowRounds):
            return served.follow_rounds(message)
        if isinstance(message, wire.Updated):
            return served.follow_updated(message)
        if isinstance(message, wire.Grouped):
            served.buckets.group(message.ids, message.sizes)
        elif isinstance(message, wire.InDoubt):
            served.buckets.follow_doubt(message.ids, message.why)
        elif isinstance(message, wire.ReadBy):
            served.values.remember(message.ids, message.ranks)
        elif isinstance(message, wire.EncodedAnswer):
            served.values.follow(message)
        elif isinstance(message, wire.OptimizerCalls):
            self._agreements[message.store].restore(message)
        elif isinstance(message, wire.StripeState | wire.TablePage | wire.TableRest):
            restore_table(message, served.buckets, served.tables)
        else:
            restore(message, served.buckets, served.updates, served.values.compressed)
        return []

    def capture(self) -> Iterator[wire.Message | Iterable[wire.Message]]:
        """Return the records that make this state of a server without one. See ``snapshot``, ``table_snapshot``."""
        yield wire.Roster(0, sorted(self._departed))
        for store, served in self.open.items():
            opened_by, closed_by = sorted(self._opened_by[store]), sorted(self._closed_by[store])
            yield wire.StoreState(store, opened_by, closed_by, **served.rule.described, lineage=served.lineage)
            agreement = self._agreements[store]
            yield agreement.record()
            yield from snapshot(store, served.buckets, served.updates, served.values.compressed)
            yield from table_snapshot(store, served.buckets)
            yield from served.pauses.requests
            # The pauses split there what has been merged here since.
            buckets = sorted(served.buckets.all(), key=lambda bucket: bucket.ids)
            yield grouped_record(store, buckets)
            yield from agreement.waiting

    def _new(self, store: int, rule: Rule, lineage: int) -> ServedStore:
        recording = Recording(store, self.recorder, self._memory)
        served = self.open[store] = ServedStore(rule, self._workers, self._memory, recording, self._times, lineage)
        served.tracer = self._tracer
        served.depart(self._departed)
        self._closed_by[store] = set()
        self._agreements[store] = OptimizerAgreement(store, served.updates, served.set_optimizer, self._rank)
        return served

    def require(self, store: int) -> ServedStore:
        """Return an open store; raise ``UsageError`` if it is not open."""
        served = self.open.get(store)
        if served is None:
            raise UsageError(f"store {store} is not open; send Open first")
        return served

    # ---- requests

    def serve(self, peer: bytes, message: wire.Request) -> list[Answer]:
        """Do what ``message`` asks; return the answers that need not wait any more, and record what has changed."""
        answers = self._serve(peer, message)
        if self.recorder is not None and isinstance(message, WHOLE):
            self.recorder.note(message)
        return answers

    def _serve(self, peer: bytes, message: wire.Request) -> list[Answer]:
        if isinstance(message, wire.Push):  # first what comes most often
            return self.require(message.store).push(peer, message)
        if isinstance(message, wire.Open):
            self._open(message)
            return [Answer(peer, message, wire.Ack(message.seq))]
        if isinstance(message, wire.Close):
            return [Answer(peer, message, wire.Ack(message.seq)), *self._close(message)]
        if not isinstance(message, SERVED):
            raise UsageError(f"servers do not handle a {type(message).__name__}")
        served = self.require(message.store)
        if isinstance(message, OF_VALUES):
            served.buckets.require_sound(message.ids)
        elif isinstance(message, wire.PutRows | wire.PutTableRest):
            served.buckets.require_sound([message.id])
        if isinstance(message, RowRequest):
            return serve_rows(served, peer, message)
        if isinstance(message, wire.Pull):
            return served.when_due(peer, message)
        if isinstance(message, wire.Pause):
            return served.pause(peer, message) + self._abandoned()
        if isinstance(message, wire.GetStates):
            return [Answer(peer, message, served.updates.get_states(message))]
        if isinstance(message, wire.SetOptimizer):
            return self._agreements[message.store].take(peer, message) + self._abandoned()
        if message.node.rank != 0:
            raise UsageError(f"only worker 0 may send {type(message).__name__}, and {message.node} did")
        if isinstance(message, wire.Init):
            served.init(message)
        else:
            served.updates.put_states(message)
        return [Answer(peer, message, wire.Ack(message.seq))]

    def _open(self, message: wire.Open) -> None:
        rule = Rule.of(message)
        served = self.open.get(message.store)
        opened_by = self._opened_by.setdefault(message.store, set())
        # A worker that was interrupted while it made a store may make another with the same number.
        if served is None or (served.rule != rule and opened_by <= {message.node.rank}):
            self._new(message.store, rule, message.lineage)
        elif served.rule != rule:
            other = min(opened_by - {message.node.rank})
            raise Mismatch(f"store {message.store} is {rule} on {message.node}, but {served.rule} on worker {other}")
        opened_by.add(message.node.rank)

    def _close(self, message: wire.Close) -> list[Answer]:
        """Note that a worker has closed a store; when all have, drop its values."""
        closed_by = self._closed_by.get(message.store)
        if closed_by is None:
            return []
        closed_by.add(message.node.rank)
        if len(closed_by) < len(self._workers):
            return []
        error = UsageError("this store has been closed by all workers")
        served, agreement = self.open.pop(message.store), self._agreements.pop(message.store)
        del self._opened_by[message.store], self._closed_by[message.store]
        return served.close(error) + agreement.abandon(error)

    def _abandoned(self) -> list[Answer]:
        """Fail the calls of ``set_optimizer`` that wait for worker 0's in vain."""
        answers: list[Answer] = []
        for store, agreement in self._agreements.items():
            answers += agreement.abandon_if_vain(self._departed, self.open[store].pauses.ranks)
        return answers

    # ---- reports

    def activity(self, now: float) -> ServedActivity:
        """Return what has been done in all stores, and who waits in them. The cost does not grow with the requests."""
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
        """Say which of the workers that are ``missing`` have not made the store: they may never do so."""
        absent = set(missing) - self._opened_by[store]
        if not absent:
            return ""
        who = f"{name('worker', absent)} {have(absent)} not made this store"
        return f"; {who}: all workers must make the same stores, in the same order"

    def _inside(self) -> str:
        """Say who is inside ``join`` of any store: waiting for such a worker may be in vain."""
        ranks = sorted(frozenset().union(*(served.pauses.ranks for served in self.open.values())))
        return "; inside join(): " + ", ".join(f"worker {rank}" for rank in ranks) if ranks else ""


FOLLOWED = (
    wire.Grouped,
    wire.InDoubt,
    wire.ClosedRounds,
    wire.ClosedRowRounds,
    wire.Updated,
    wire.ReadBy,
    wire.EncodedAnswer,
    wire.OptimizerCalls,
    wire.BucketState,
    wire.StatesState,
    wire.EncoderState,
    wire.StripeState,
    wire.TablePage,
    wire.TableRest,
)


def serve_rows(served: ServedStore, peer: bytes, message: RowRequest) -> list[Answer]:
    """Do what ``message`` asks of the tables of ``served``; return the answers that need not wait any more.

    Raises:
        UsageError, WireError: it cannot be done. Nothing has changed.
    """
    if isinstance(message, wire.PushRows):
        return served.push_rows(peer, message)
    if isinstance(message, OfWorkerZero) and message.node.rank != 0:
        raise UsageError(f"only worker 0 may send {type(message).__name__}, and {message.node} did")
    if isinstance(message, wire.PullRows | wire.FreezeTable | wire.EvictRows):
        return served.when_due(peer, message)
    tables = served.tables
    if isinstance(message, wire.ReadFrozen):
        return [Answer(peer, message, tables.freezes.read(message))]
    if isinstance(message, wire.DescribeTable):
        return [Answer(peer, message, tables.describe(message))]
    if isinstance(message, wire.Thaw):
        tables.freezes.thaw(message.node, message.number)
    elif isinstance(message, wire.InitTables):
        tables.init(message)
    elif isinstance(message, wire.PutRows):
        tables.put(message)
    else:
        tables.put_rest(message)
    return [Answer(peer, message, wire.Ack(message.seq))]
