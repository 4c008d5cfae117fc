"""The core of a server: messages in, replies out; a ``ServedStore`` holds each store. No I/O, no clock."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from kvstore import wire
from kvstore.errors import CheckpointError, KVStoreError, NodeLost, UsageError, WeightsInDoubt, WireError
from kvstore.rows.slab_space import GrownTables
from kvstore.sealed_folders import FileRecord
from kvstore.tracer import Tracer
from kvstore.transport.memory import Heap, Memory
from kvstore.transport.transport import Admission
from servers.activity import ServedActivity
from servers.names import workers
from servers.reading.desk import ReadDesk
from servers.requests.guest_links import ReaderLinks
from servers.requests.kept_states import KeptStates
from servers.requests.reasons import Reason
from servers.requests.repeats import Ledger, Verdict
from servers.requests.replies import Answer, Outbox, refuse
from servers.requests.reply_links import NOWHERE, ReplyLinks, turn_away
from servers.saving import CheckpointRequests
from servers.store.capture import StoreCapture
from servers.store.lateness import ArrivalTimes
from servers.store.open_stores import ServedStores
from servers.store.recording import Recorder
from servers.store.served_store import ServedStore

log = logging.getLogger(__name__)

KEPT = (
    wire.Ack,
    wire.Failure,
    wire.Resume,
    wire.Pull,
    wire.PullRows,
)  # what a new standby is told of answers; values follow from clocks
VALUED = (wire.Push, wire.Pull, wire.PushRows, wire.PullRows)  # what is answered with values
BRINGING = (wire.Values, wire.Rows)
OF_CHECKPOINTS = (wire.Capture, wire.AwaitCapture)
OF_NEWCOMERS = (wire.KeepState, wire.TakeState, wire.DropState)
PAGE = 1 << 14  # answers in one message
NOBODY: Mapping[int, int] = MappingProxyType({})
NO_KEYS: Mapping[int, str] = MappingProxyType({})
MOST_EARLY = 256  # messages; a worker that joins has sent a few before its first answer


class Shard:
    """One server's part of all stores.

    Args:
        keys: the public keys that the workers have joined with, by rank; empty where links prove no keys.
        aggregated: for each aggregator, the ranks of the workers that it speaks for.
        readers: how many readers there may be at once; 0 for none.
        min_workers: not 0 if the job goes on without workers that are lost.
        max_workers: so many there may be with those that are added while the job runs.
        recorder: is told of each change, in their order and before the answers that depend on it are returned, by a
            message that a standby is to ``apply``; None if there is no standby. The message's buffers refer to memory
            that stays as it is while they exist.

    Attributes:
        reading: the requests of readers; None if there are to be none.
        times: when pushes come. Its ``now`` is set before a message is handled.
    """

    def __init__(
        self,
        rank: int,
        num_workers: int,
        memory: Memory | None = None,
        admission: Admission | None = None,
        keys: Sequence[str] = (),
        aggregated: Sequence[Sequence[int]] = (),
        aggregator_keys: Sequence[str] = (),
        recorder: Recorder | None = None,
        readers: int = 0,
        reader_key: str = "",
        min_workers: int = 0,
        max_workers: int = 0,
    ) -> None:
        self.rank = rank
        seats = max(num_workers, max_workers)
        self._speakers = Speakers(num_workers, keys, aggregated, aggregator_keys, seats)
        memory = memory or Heap()
        self.times = ArrivalTimes(seats)
        self._stores = ServedStores(rank, range(seats), memory, self.times, num_workers)
        self._stores.elastic = min_workers > 0
        # A worker may be let in before the news comes that the process before it has died.
        self._stores.admits = lambda rank, incarnation: self._hear_no_more({rank: incarnation - 1})
        self._stores.record(recorder)
        self.ledger: Ledger[wire.Reply | wire.Pull | wire.PullRows] = Ledger()
        self.checkpoints = CheckpointRequests(rank, self._stores)
        self._reply_links = ReplyLinks(admission)
        self.kept = KeptStates()
        # What a worker that was started again has sent before the scheduler had said so.
        self._early: deque[tuple[bytes, wire.Request]] = deque(maxlen=MOST_EARLY)
        self.reading = ReadDesk(self.stores, memory, ReaderLinks(readers, reader_key, admission)) if readers else None

    @property
    def stores(self) -> Mapping[int, ServedStore]:
        return self._stores.open

    @property
    def grown(self) -> GrownTables:
        """Tables that work is to be done for while no message waits."""
        return self._stores.grown

    @property
    def rounds(self) -> int:
        targets = (target for served in self.stores.values() for target in served.buckets.targets())
        return max((target.rounds.version for target in targets), default=0)

    def activity(self, now: float) -> ServedActivity:
        activity = self._stores.activity(now)
        return activity if self.reading is None else activity._replace(followed=self.reading.followed_by())

    def handle(self, peer: bytes, message: wire.Message) -> Outbox:
        if self.reading is not None and self.reading.links.concerns(peer, message):
            return self.reading.handle(peer, message)
        # A link that was admitted for this member is not looked at again: one look-up a message, not three.
        if not isinstance(message, wire.Request) or not self._reply_links.has(peer, message.sender.node):
            refusal = self.refusal(peer, message)
            if refusal is not None:
                return refusal
        if not isinstance(message, wire.Request):
            aggregator = self.bypassed(message)
            if aggregator is not None:
                self.bypass([aggregator])
            return []
        if isinstance(message, wire.Explain):
            return [(peer, self._explain(message).reply(message.seq))]
        verdict = self.ledger.admit(message) if message.remembered else Verdict.NEW
        if verdict is not Verdict.NEW:
            return self._again(peer, message) if verdict is Verdict.REPEAT else []
        try:
            self._speakers.require(message)
            if isinstance(message, OF_CHECKPOINTS):
                answers = self.checkpoints.serve(peer, message)
            elif isinstance(message, OF_NEWCOMERS):
                answers = [self.kept.serve(peer, message)]
            else:
                answers = self._stores.serve(peer, message)
        except Exception as exc:
            if not isinstance(exc, UsageError | WireError | WeightsInDoubt):
                log.exception("a request of %s failed", message.node)
            answers = [refuse(peer, message, exc)]
        return self._note(answers) if answers else []

    def refusal(self, peer: bytes, message: wire.Message) -> Outbox | None:
        """Return what to send instead of handling ``message``; None if its sender may speak here over this link."""
        if not isinstance(message, wire.Request) and not isinstance(message, wire.Here):
            log.debug("dropped a %s, which servers do not handle", type(message).__name__)
            return []
        key = self._speakers.key(message.node)
        if key is None:
            comes = self._stores.elastic and self._speakers.comes(message.node, self._reply_links.key(peer))
            if comes and isinstance(message, wire.Request):
                self._early.append((peer, message))
                return []
            return turn_away(peer, message, *self._speakers.stranger(message.node))
        if not self._reply_links.admit(peer, message, key):
            return turn_away(peer, message, "joined this job with another key than that of this link")
        return None

    def depart(
        self,
        workers: Collection[int],
        lost: Mapping[int, int] = NOBODY,
        came: Mapping[int, int] = NOBODY,
        keys: Mapping[int, str] = NO_KEYS,
        aggregators: Collection[int] = (),
    ) -> Outbox:
        """Go on without workers; see ``wire.Roster``. What comes of one that is ``lost`` from now on is refused.

        ``came`` are those that have been started again or added, with their incarnations: they are heard from now on,
        over links that have proved these ``keys``.
        """
        if aggregators:
            self.bypass(aggregators)
        self._hear_no_more(lost)
        self._speakers.hear(came, keys)
        outbox = self._note(self._stores.depart(workers, lost, came, keys))
        early, self._early = self._early, deque(maxlen=MOST_EARLY)
        return outbox + [answer for peer, message in early for answer in self.handle(peer, message)]

    def bypassed(self, message: wire.Message) -> int | None:
        """Return the aggregator that a worker of its host says is lost; None if ``message`` says no such thing."""
        if not isinstance(message, wire.Here) or message.bypassed < 0 or not self._stores.elastic:
            return None
        return message.bypassed if self._speakers.speaks_for(message.bypassed, message.node) else None

    def bypass(self, aggregators: Collection[int]) -> None:
        """Go on without ``aggregators``, which are lost: their workers repeat here what has not been answered.

        A worker may hear of the loss before this server does. So it says so over its link before it repeats anything.
        """
        for node, ranks in self._speakers.lose_aggregators(aggregators).items():
            self._reply_links.forget(node)
            self._stores.bypass(node, ranks)

    def _hear_no_more(self, lost: Mapping[int, int]) -> None:
        for node in self._speakers.lose(lost):
            self._reply_links.forget(node)
            self.kept.drop(node)

    def due(self) -> float | None:
        """Return when ``tick`` has something to do; None if nothing waits for the time."""
        return self._stores.due()

    def tick(self, now: float) -> Outbox:
        """Close the rounds that have waited for late workers for long enough."""
        self.times.now = now
        return self._note(self._stores.tick())

    def record(self, recorder: Recorder | None) -> None:
        self._stores.record(recorder)

    def trace(self, tracer: Tracer) -> None:
        self._stores.trace(tracer)

    def apply(self, message: wire.Message) -> None:
        """Make a change that a primary has recorded. Its answers, which the primary sends, are known here for repeats.

        If it raises, the change does not follow from this state, which is in doubt from now on.
        """
        if isinstance(message, wire.Roster):
            self.depart(*message.told)
        elif isinstance(message, wire.LedgerPage):
            self._restore_page(message)
        elif not isinstance(message, wire.Request):
            self._note(self._stores.follow(message))
        elif isinstance(message, wire.Push | wire.PushRows):
            self._apply_push(message)
        elif self.ledger.admit(message) is Verdict.NEW or isinstance(message, wire.Admit):
            # A capture lists admissions store by store. The sponsor sent them in another order, so the ledger would
            # take some of them for stale.
            try:
                self._note(self._stores.serve(NOWHERE, message))
            except UsageError as exc:
                raise ValueError(
                    f"a {type(message).__name__} of {message.node} was recorded, but fails: {exc}"
                ) from exc

    def capture(self) -> Iterator[wire.Message]:
        """Return the records that give this state, that of the call, to a new shard which applies them.

        Records of rows of tables are made as they are taken; see ``FrozenPages``.
        """
        return _flattened(deque([*self._stores.capture(), *self._pages()]))

    def _apply_push(self, message: wire.Push | wire.PushRows) -> None:
        """Make a push that was recorded as it came: an update, or contributions that were late."""
        served = self.stores.get(message.store)
        if served is None:
            raise ValueError(f"a push to store {message.store}, which is not open")
        sync = (
            served.rule.mode == "sync"
        )  # its clock tells a repeat; the ledger would keep its worker's resent push out
        if not sync and self.ledger.admit(message) is not Verdict.NEW:
            return
        error = served.follow_push(message)
        if not sync:
            answer = refuse(NOWHERE, message, error).reply if error is not None else wire.Ack(message.seq)
            self.ledger.note(message, _values_of_now(message) if error is None and message.want else answer)

    def _pages(self) -> Iterator[wire.LedgerPage]:
        """Return what a standby must know of requests that may be repeated, beside what follows from their clocks."""
        waiting = {
            request.sender[:2]: _values_of_now(request)
            for served in self.stores.values()
            if served.rule.mode == "async"
            for request in served.parked  # pushes among them, and pulls in place of repeated pushes, have taken effect
            if isinstance(request, VALUED)
        }
        for node, done, answers in self.ledger.pages:
            known = {seq: waiting.get((node, seq)) if answer is None else answer for seq, answer in answers.items()}
            short = {seq: answer for seq, answer in known.items() if isinstance(answer, KEPT)}
            for start in range(0, max(1, len(short)), PAGE):
                seqs = list(short)[start : start + PAGE]
                yield wire.LedgerPage(node, done, seqs, [wire.encode(short[seq])[0] for seq in seqs])

    def _restore_page(self, message: wire.LedgerPage) -> None:
        answers: dict[int, wire.Reply | wire.Pull | wire.PullRows] = {}
        for seq, frame in zip(message.seqs, message.buffers, strict=True):
            answer = wire.decode([frame])
            if not isinstance(answer, KEPT):
                raise ValueError(f"a {type(answer).__name__} is no answer that a ledger keeps")
            answers[seq] = answer
        self.ledger.restore(message.node, message.done, answers)

    def _explain(self, message: wire.Explain) -> Reason:
        capture = self.checkpoints.explain(message.node, message.about)
        return Reason(capture) if capture else self._stores.explain(message)

    def saved(self, capture: StoreCapture, path: Path, outcome: FileRecord | CheckpointError) -> Outbox:
        return self._note(self.checkpoints.saved(capture, path, outcome))

    def _again(self, peer: bytes, message: wire.Request) -> Outbox:
        """Answer a repeat as the first time; in an async store with current values, for old ones are not kept there."""
        before = self.ledger.recall(message)
        if before is None:
            self._reply_links.repeat(peer, message)
            return []
        if not isinstance(before, wire.Pull | wire.PullRows):
            return [(peer, before)]
        if isinstance(before, wire.PullRows):
            if not isinstance(message, wire.PushRows | wire.PullRows):
                return []  # no repeat: another request with its number
            before = _rows_of_now(message)
        # The repeat is served as a pull: the push has taken effect once, and must not again.
        self.ledger.note(message, None)  # it may wait: the server that answered it first was another one
        try:
            answers = self._stores.serve(peer, before)
        except (UsageError, WeightsInDoubt) as exc:
            answers = [refuse(peer, before, exc)]
        return self._note(answers)

    def _note(self, answers: list[Answer]) -> Outbox:
        note = self.ledger.note
        for _, request, reply in answers:
            if isinstance(reply, BRINGING) and isinstance(request, VALUED) and not self._keeps(request.store):
                note(request, _values_of_now(request))
            else:
                note(request, reply)
        return self._reply_links.outbox(answers)

    def _keeps(self, store: int) -> bool:
        """Return whether values that were sent are kept for repeats: in rounds, an answer is that of its round.

        It costs no memory as long as a worker has its answer before its next push: then the answer is forgotten before
        the value changes. In an async store it would cost a copy of the value for each push of another worker.
        """
        served = self.stores.get(store)
        return served is not None and served.rule.mode == "sync"


def _flattened(parts: deque[wire.Message | Iterable[wire.Message]]) -> Iterator[wire.Message]:
    while parts:
        part = parts.popleft()
        if isinstance(part, wire.Message):
            yield part
        else:
            yield from part


def _values_of_now(request: wire.Push | wire.Pull | wire.PushRows | wire.PullRows) -> wire.Pull | wire.PullRows:
    """Return what the ledger remembers of ``request`` where the answer to a repeat has current values.

    Of rows it is that and no more: which ones are wanted, the repeat says.
    """
    if isinstance(request, wire.PushRows | wire.PullRows):
        return wire.PullRows(request.sender, request.store, [], [], [], request.wide, [])
    return wire.Pull(request.sender, request.store, request.ids, request.clocks, request.back, request.ranks)


def _rows_of_now(repeat: wire.PushRows | wire.PullRows) -> wire.PullRows:
    """Return a request for the rows that ``repeat`` wants, of an async store, as they are now."""
    return wire.PullRows(
        repeat.sender,
        repeat.store,
        repeat.ids,
        repeat.clocks,
        repeat.wanted,
        repeat.wide,
        repeat.codecs,
        repeat.buffers[-1:],
    )


CARRIED = (wire.Push, wire.Pull)  # what aggregators send for workers


class Speakers:
    """The members that one server hears. For each aggregator, ``aggregated`` has the workers that it speaks for."""

    def __init__(
        self,
        num_workers: int,
        worker_keys: Sequence[str] = (),
        aggregated: Sequence[Sequence[int]] = (),
        aggregator_keys: Sequence[str] = (),
        seats: int = 0,
    ) -> None:
        self._aggregated = [sorted(set(ranks)) for ranks in aggregated]
        self._keys = _keyed("worker", num_workers, worker_keys)
        self._keys |= _keyed("aggregator", len(aggregated), aggregator_keys)
        self._lost: set[wire.Node] = set()
        self._seats = max(num_workers, seats)
        self._worker_keys = {rank: worker_keys[rank] if rank < len(worker_keys) else "" for rank in range(num_workers)}

    def key(self, node: wire.Node) -> str | None:
        """Return the public key that ``node`` has joined with, empty where links prove none; None for a stranger."""
        return self._keys.get(node)

    def lose(self, workers: Mapping[int, int]) -> list[wire.Node]:
        """Hear these workers no more, up to the incarnations that are lost; return those heard until now."""
        gone = [node for node in self._keys if node.role == "worker" and node.incarnation <= workers.get(node.rank, 0)]
        for node in gone:
            del self._keys[node]
        self._lost.update(gone)
        return gone

    def hear(self, newcomers: Mapping[int, int], keys: Mapping[int, str] = NO_KEYS) -> None:
        """Hear these workers, of which each has been started again or added, in its new incarnation."""
        for rank, incarnation in newcomers.items():
            node = wire.Node("worker", rank, incarnation)
            if rank < self._seats and node not in self._lost:
                self._keys[node] = self._worker_keys.setdefault(rank, keys.get(rank, ""))

    def comes(self, node: wire.Node, key: str) -> bool:
        """Whether ``node``, whose link has proved ``key``, may be a worker that has been started again or added."""
        may = node.role == "worker" and 0 <= node.rank < self._seats and node.incarnation > 1
        return may and node not in self._lost and self._worker_keys.get(node.rank, key) == key

    def lose_aggregators(self, aggregators: Collection[int]) -> dict[wire.Node, list[int]]:
        """Hear these aggregators no more; return those heard until now, with the workers that they spoke for."""
        nodes = {wire.Node("aggregator", rank, 1): rank for rank in aggregators if 0 <= rank < len(self._aggregated)}
        gone = {node: self._aggregated[rank] for node, rank in nodes.items() if node in self._keys}
        for node in gone:
            del self._keys[node]
        self._lost.update(gone)
        return gone

    def speaks_for(self, aggregator: int, worker: wire.Node) -> bool:
        """Whether ``worker`` is one of those that ``aggregator`` speaks for, or has spoken for."""
        return 0 <= aggregator < len(self._aggregated) and worker.rank in self._aggregated[aggregator]

    def stranger(self, node: wire.Node) -> tuple[str, type[KVStoreError]]:
        """Say why ``node`` is not heard, and which error that is."""
        if node in self._lost:
            return wire.GIVEN_UP, NodeLost
        return "is neither a worker nor an aggregator of this job", UsageError

    def require(self, message: wire.Request) -> None:
        node = message.sender.node
        if not isinstance(message, CARRIED):
            if node.role == "aggregator":
                raise UsageError(
                    f"{node} sent a {type(message).__name__}; "
                    "servers take Push, Pull and Explain from aggregators, the rest from workers"
                )
            return
        if isinstance(message, wire.Push) and message.encode is not None:
            raise UsageError(
                f"{node} sent a Push with encode, which asks an aggregator to compress; "
                "servers take values that are compressed already, with codec"
            )
        if node.role == "aggregator":
            if not message.ranks or message.ranks != self._aggregated[node.rank]:  # most often a whole host's
                self._require_aggregated(message)
        elif message.ranks:
            raise UsageError(
                f"{node} sent a {type(message).__name__} for {workers(message.ranks)}; "
                "a worker sends without ranks, and only for itself"
            )

    def _require_aggregated(self, message: wire.Push | wire.Pull) -> None:
        what = f"{message.node} sent a {type(message).__name__}"
        mine = self._aggregated[message.node.rank]
        if not message.ranks:
            raise UsageError(f"{what} without ranks, which say for which workers it is")
        if not set(mine).issuperset(message.ranks):
            raise UsageError(f"{what} for {workers(message.ranks)}; it speaks for {workers(mine)} only")


def _keyed(role: str, number: int, keys: Sequence[str]) -> dict[wire.Node, str]:
    """Return the key of each member of ``role``. All are first incarnations: nobody is replaced yet."""
    return {wire.Node(role, rank, 1): keys[rank] if rank < len(keys) else "" for rank in range(number)}
