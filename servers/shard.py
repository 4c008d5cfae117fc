"""The core of a server: messages in, replies out; a ``Table`` holds each store. No I/O, no clock."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from kvstore.checkpoint.tensors import FileRecord
from kvstore.errors import CheckpointError, Mismatch, NodeLost, UsageError, WeightsInDoubt, WireError
from kvstore.optim.optimizer import Optimizer, describe
from kvstore.rule import Rule
from kvstore.transport.base import Admission
from kvstore.transport.memory import Heap, Memory
from kvstore.wire import (
    MAX_REASON,
    Ack,
    AwaitCapture,
    Capture,
    Captured,
    Close,
    Explain,
    Explanation,
    GetStates,
    Here,
    Init,
    Message,
    Open,
    Pause,
    Pull,
    Push,
    PutStates,
    Reply,
    Request,
    SetOptimizer,
    Values,
)
from servers.requests.agreement import Agreement
from servers.requests.captured import CaptureDesk
from servers.requests.ledger import Ledger, Verdict
from servers.requests.replies import Answer, Outbox, refuse
from servers.requests.reply_links import ReplyLinks, turn_away
from servers.requests.speakers import Speakers
from servers.store.capture import StoreCapture
from servers.store.table import Table

log = logging.getLogger(__name__)

Asker = tuple[bytes, SetOptimizer]


class Shard:
    """One server's part of all stores.

    Args:
        rank: this server's.
        num_workers: of the job.
        memory: for values and sums.
        admission: admits and refuses links.
        keys: the public keys that the workers have joined with, by rank; empty where links prove no keys.
        aggregated: for each aggregator, the ranks of the workers that it speaks for.
        aggregator_keys: of the aggregators; see ``keys``.

    Attributes:
        rank: this server's.
        tables: the open stores, by number.
        ledger: the requests that may be repeated.
        save: writes a capture to its file, then has ``saved`` called; None if this server has no place for checkpoints.
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
    ) -> None:
        self.rank = rank
        self._workers = range(num_workers)
        self._speakers = Speakers(num_workers, keys, aggregated, aggregator_keys)
        self._memory = memory or Heap()
        self.tables: dict[int, Table] = {}
        self._opened_by: dict[int, set[int]] = {}
        self._closed_by: dict[int, set[int]] = {}
        self._agreements: dict[int, Agreement[Optimizer, Asker]] = {}
        self._departed: Collection[int] = ()
        self.ledger: Ledger[Reply | Pull] = Ledger()
        self.save: Callable[[StoreCapture], None] | None = None
        self._captures = CaptureDesk[StoreCapture]()
        self._reply_links = ReplyLinks(admission)

    @property
    def rounds(self) -> int:
        """The highest number of rounds that are over of any segment."""
        buckets = (bucket for table in self.tables.values() for bucket in table.buckets.all())
        return max((bucket.rounds.version for bucket in buckets), default=0)

    def handle(self, peer: bytes, message: Message) -> Outbox:
        """Return what to send, and to whom, because ``message`` came from ``peer``."""
        refusal = self.refusal(peer, message)
        if refusal is not None:
            return refusal
        if not isinstance(message, Request):
            return []
        if isinstance(message, Explain):
            return [(peer, Explanation(message.seq, self._explain(message)[:MAX_REASON]))]
        verdict = self.ledger.admit(message)
        if verdict is Verdict.REPEAT:
            return self._again(peer, message)
        if verdict is Verdict.STALE:
            return []
        try:
            self._speakers.require(message)
            answers = self._serve(peer, message)
        except WeightsInDoubt:
            raise
        except Exception as exc:
            if not isinstance(exc, UsageError | WireError):
                log.exception("a request of %s failed", message.node)
            answers = [refuse(peer, message, exc)]
        return self._note(answers)

    def refusal(self, peer: bytes, message: Message) -> Outbox | None:
        """Return what to send instead of handling ``message``; None if its sender may speak here over this link."""
        if not isinstance(message, Request) and not isinstance(message, Here):
            log.debug("dropped a %s, which servers do not handle", type(message).__name__)
            return []
        key = self._speakers.key(message.node)
        if key is None:
            return turn_away(peer, message, "is neither a worker nor an aggregator of this job")
        if not self._reply_links.admit(peer, message, key):
            return turn_away(peer, message, "joined this job with another key than that of this link")
        return None

    def depart(self, workers: Collection[int]) -> Outbox:
        """Note which workers have left in order; fail the requests that wait for them."""
        self._departed = workers
        answers = [answer for table in self.tables.values() for answer in table.depart(workers)]
        return self._note(answers + self._abandoned())

    def _serve(self, peer: bytes, message: Request) -> list[Answer]:
        if isinstance(message, Open):
            self._open(message)
            return [Answer(peer, message, Ack(message.seq))]
        if isinstance(message, Close):
            return [Answer(peer, message, Ack(message.seq)), *self._close(message)]
        if isinstance(message, Capture | AwaitCapture):
            return self._capture(peer, message)
        if not isinstance(message, Init | Push | Pull | Pause | SetOptimizer | GetStates | PutStates):
            raise UsageError(f"servers do not handle a {type(message).__name__}")
        table = self.tables.get(message.store)
        if table is None:
            raise UsageError(f"store {message.store} is not open; send Open first")
        if isinstance(message, Push):
            return table.push(peer, message)
        if isinstance(message, Pull):
            return table.pull(peer, message)
        if isinstance(message, Pause):
            return table.pause(peer, message) + self._abandoned()
        if isinstance(message, GetStates):
            return [Answer(peer, message, table.get_states(message))]
        if isinstance(message, SetOptimizer):
            return self._set_optimizer(peer, message, table)
        if message.node.rank != 0:
            raise UsageError(f"only worker 0 may send {type(message).__name__}, and {message.node} did")
        if isinstance(message, Init):
            table.init(message)
        else:
            table.put_states(message)
        return [Answer(peer, message, Ack(message.seq))]

    def saved(self, capture: StoreCapture, path: Path, outcome: FileRecord | CheckpointError) -> Outbox:
        """Note that ``capture`` has been written to ``path``, or why not; answer who waits for that."""
        if capture.store in self.tables:
            self.tables[capture.store].captures.end(capture)
        if isinstance(outcome, CheckpointError):
            return self._note(self._captures.ended(capture.store, capture.number, outcome))
        clocks = [capture.clocks[number] for number in capture.ids]
        captured = Captured(0, outcome.nbytes, outcome.sha256, clocks, capture.optimizer, str(path))
        return self._note(self._captures.ended(capture.store, capture.number, captured))

    def _capture(self, peer: bytes, message: Capture | AwaitCapture) -> list[Answer]:
        if message.node.rank != 0 or message.node.role != "worker":
            raise UsageError(f"only worker 0 may send {type(message).__name__}, and {message.node} did")
        if isinstance(message, AwaitCapture):
            return self._captures.wait(peer, message)
        table = self.tables.get(message.store)
        if table is None:
            raise UsageError(f"store {message.store} is not open; send Open first")
        if self.save is None:
            raise CheckpointError(
                f"server {self.rank} has no directory for checkpoints: set KVSTORE_CHECKPOINT_DIR for all processes of "
                "the job (launch.py --checkpoint-dir)"
            )
        self._captures.begin(message.store, message.number)
        try:
            clocks = dict(zip(message.ids, message.clocks, strict=True))
            table.captures.begin(message.store, message.number, clocks, self.save)
        except BaseException:
            self._captures.forget(message.store, message.number)
            raise
        return [Answer(peer, message, Ack(message.seq))]

    def _open(self, message: Open) -> None:
        rule = Rule(
            message.mode,
            message.staleness,
            message.quorum,
            message.late,
            message.compensation,
            message.finite,
            message.aggregate,
        )
        table = self.tables.get(message.store)
        opened_by = self._opened_by.setdefault(message.store, set())
        # A worker that was interrupted while it made a store may make another with the same number.
        if table is None or (table.rule != rule and opened_by <= {message.node.rank}):
            table = self.tables[message.store] = Table(rule, self._workers, self._memory)
            table.depart(self._departed)
            self._closed_by[message.store] = set()
            self._agreements[message.store] = Agreement("set_optimizer")
        elif table.rule != rule:
            other = min(opened_by - {message.node.rank})
            raise Mismatch(f"store {message.store} is {rule} on {message.node}, but {table.rule} on worker {other}")
        opened_by.add(message.node.rank)

    def _close(self, message: Close) -> list[Answer]:
        """Note that a worker has closed a store; when all have, drop its values."""
        closed_by = self._closed_by.get(message.store)
        if closed_by is None:
            return []
        closed_by.add(message.node.rank)
        if len(closed_by) < len(self._workers):
            return []
        error = UsageError("this store has been closed by all workers")
        table, agreement = self.tables.pop(message.store), self._agreements.pop(message.store)
        del self._opened_by[message.store], self._closed_by[message.store]
        return table.close(error) + [refuse(*asker, error) for asker in agreement.abandon()]

    def _set_optimizer(self, peer: bytes, message: SetOptimizer, table: Table) -> list[Answer]:
        given = dict(message.hyper) | {
            "lr": message.lr,
            "rescale_grad": message.rescale,
            "clip_gradient": message.clip_gradient,
            "lr_mult": dict(message.lr_mult),
            "wd_mult": dict(message.wd_mult),
            "groups": [{"keys": keys, **dict(hyper)} for keys, hyper in message.groups],
        }
        try:
            proposal = describe(message.name, given)
        except UsageError as exc:  # the worker may well have what this process has not
            raise type(exc)(f"server {self.rank}: {exc}") from None
        agreement = self._agreements[message.store]
        outcomes = (
            agreement.decide(message.version, proposal, (peer, message), table.set_optimizer)
            if message.node.rank == 0
            else agreement.propose(message.version, proposal, (peer, message))
        )
        return [
            Answer(whom, request, Ack(request.seq)) if error is None else refuse(whom, request, error)
            for (whom, request), error in outcomes
        ] + self._abandoned()

    def _abandoned(self) -> list[Answer]:
        """Fail the calls of ``set_optimizer`` that wait for worker 0's, if it has left or is inside ``join``."""
        answers: list[Answer] = []
        for store, agreement in self._agreements.items():
            error: Exception
            if 0 in self._departed:
                error = NodeLost("worker 0 has left the job without calling set_optimizer")
            elif 0 in self.tables[store].pauses.ranks:
                error = UsageError("worker 0 is inside join(), and has not called set_optimizer")
            else:
                continue
            answers += [refuse(*asker, error) for asker in agreement.abandon()]
        return answers

    def _explain(self, message: Explain) -> str:
        for table in self.tables.values():
            text = table.explain(message.node, message.about)
            if text:
                return text + self._inside()
        text = self._captures.explain(message.node, message.about)
        if text:
            return text
        for agreement in self._agreements.values():
            asked = ((request.node, request.seq) for _, request in agreement.waiting)
            if (message.node, message.about) in asked:
                return "waits for worker 0, which has not called set_optimizer"
        return ""

    def _inside(self) -> str:
        """Say who is inside ``join`` of any store: waiting for such a worker may be in vain."""
        ranks = sorted(frozenset().union(*(table.pauses.ranks for table in self.tables.values())))
        return "; inside join(): " + ", ".join(f"worker {rank}" for rank in ranks) if ranks else ""

    def _again(self, peer: bytes, message: Request) -> Outbox:
        """Answer a repeat as the first time; in an async store with current values, for old ones are not kept there."""
        before = self.ledger.recall(message)
        if before is None:
            self._reply_links.repeat(peer, message)
        if isinstance(before, Pull):
            table = self.tables.get(before.store)
            if table is None:
                return [(peer, refuse(peer, message, UsageError(f"store {before.store} has been closed")).reply)]
            before = table.read(before)
        return [] if before is None else [(peer, before)]

    def _note(self, answers: list[Answer]) -> Outbox:
        for _, request, reply in answers:
            remembered: Reply | Pull = reply
            if isinstance(reply, Values) and isinstance(request, Push | Pull) and not self._keeps(request.store):
                remembered = Pull(
                    request.sender, request.store, request.ids, request.clocks, request.back, request.ranks
                )
            self.ledger.note(request, remembered)
        return self._reply_links.outbox(answers)

    def _keeps(self, store: int) -> bool:
        """Return whether values that were sent are kept for repeats: in rounds, an answer is that of its round.

        It costs no memory as long as a worker has its answer before its next push: then the answer is forgotten before
        the value changes. In an async store it would cost a copy of the value for each push of another worker.
        """
        table = self.tables.get(store)
        return table is not None and table.rule.mode == "sync"
