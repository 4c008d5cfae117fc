"""The scheduler's logic: messages and the time in, messages out. No I/O."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

from kvstore.errors import NodeLost, UsageError, WireError
from kvstore.wire import (
    MAX_REASON,
    Ack,
    Alive,
    Barrier,
    Beat,
    Census,
    CloseStore,
    Counted,
    Declare,
    Explain,
    Explanation,
    Fault,
    JobFailed,
    Join,
    Leave,
    Lost,
    Message,
    Opened,
    OpenStore,
    Pause,
    Placed,
    Ready,
    Reply,
    Request,
    Roster,
    Stop,
    Welcome,
)
from servers.ledger import Ledger, Verdict
from servers.replies import Answer, Outbox, refuse
from servers.scheduler.barriers import Barriers
from servers.scheduler.joins import Joins
from servers.scheduler.keys import Keys, Outcome
from servers.scheduler.members import Event, Member, Members, State
from servers.scheduler.stores import Stores
from servers.senders import Senders

log = logging.getLogger(__name__)

REMIND_S = 60.0  # as long as not all have joined, it is said so often who is missing


class Scheduler:
    """One job's rendezvous.

    Args:
        num_workers, num_servers: how many there will be.
        limit_s: the silence, in seconds, after which a member is lost.
        farewell_s: how long after a worker has left those who wait for it are told. A process that leaves because it
            is about to fail needs that long to end, and its exit code says more than that it has left.
    """

    def __init__(self, num_workers: int, num_servers: int, limit_s: float, farewell_s: float = 0.0) -> None:
        self.members = Members(num_workers, num_servers, limit_s)
        self.failure: str | None = None
        self._farewell_s = farewell_s
        self._departed: set[int] = set()
        self._failed_at = 0.0
        self._now = self._ticked = 0.0
        self._remind_at: float | None = None
        self._epoch = 0
        self._workers = range(num_workers)
        self._loads = [0] * num_servers
        self._stores = Stores(self._workers)
        self._keys: dict[int, Keys] = {}
        self._barriers: dict[int, Barriers] = {}
        self._joins: dict[int, Joins] = {}
        self._ledger: Ledger[Reply] = Ledger()
        self._senders = Senders()
        self._notices: Outbox = []

    def handle(self, peer: bytes, message: Message, now: float) -> Outbox:
        """Return what to send, and to whom, because ``message`` came from ``peer``."""
        self._now = now
        if isinstance(message, Beat):
            self._beat(peer, message)
            return self._flush([])
        if isinstance(message, Lost):
            self._lost(message)
            return self._flush([])
        if not isinstance(message, Request):
            log.debug("dropped a %s, which is nothing to tell a scheduler", type(message).__name__)
            return []
        if isinstance(message, Explain):
            return [(peer, Explanation(message.seq, self._explain(message)[:MAX_REASON]))]
        if isinstance(message, Join):  # not in the ledger: whoever joins has no rank yet to be known by
            return self._flush(self._answers(peer, message, self._join))
        member = self.members.find(message.role, message.rank) if self.members.complete else None
        if isinstance(message, Leave) and message.rank < 0:
            return self._give_up(peer, message)
        if member is None or member.node != message.node:  # before the ledger, which strangers must not write in
            return [(peer, refuse(peer, message, UsageError(f"{message.node} is no member of this job")).reply)]
        self._senders.note(peer, message)
        verdict = self._ledger.admit(message)
        if verdict is Verdict.STALE:
            return []
        if verdict is Verdict.REPEAT:
            before = self._ledger.recall(message)
            return [] if before is None else [(peer, before)]
        return self._flush(self._answers(peer, message, functools.partial(self._serve, member)))

    def tick(self, now: float) -> Outbox:
        """Return what to send because time has passed. Best called when no message is left to handle."""
        self._now = now
        if now - self._ticked > self.members.limit_s / 2:  # this process was stopped; what it missed proves nothing
            self.members.forgive(now)
        self._ticked = now
        for member in self.members.overdue(now):
            member.happens(Event.DIES)
            self._fail(f"{member.node} is lost: it has been silent for {now - member.heard:.1f} s")
        if not self.members.complete and self.failure is None:
            self._remind()
        return self._flush(self._depart())

    @property
    def finished(self) -> bool:
        """Whether nobody needs the scheduler any more."""
        if self.failure is not None and self._now - self._failed_at > self.members.limit_s:
            return True
        started = self.members.complete or (self.failure is not None and bool(self.members.everyone))
        return started and all(m.state in (State.LEFT, State.LOST) for m in self.members.everyone)

    # ---- members

    def _join(self, peer: bytes, message: Join) -> list[Answer]:
        if self.failure is not None:
            raise NodeLost(self.failure)
        member = self.members.by_nonce(message.incarnation)
        if member is None:
            member = Member(message.role, message.incarnation, message.rank, message.address, peer, message.seq)
            self.members.join(member)
            if self.members.settle(self._now):
                log.info("all members have joined")
                for other in self.members.everyone:
                    self._notices.append((other.join_peer, self._welcome(other)))
        else:
            member.join_peer, member.join_seq = peer, message.seq
            if self.members.complete:
                self._notices.append((peer, self._welcome(member)))
        return []

    def _welcome(self, member: Member) -> Welcome:
        return Welcome(
            member.join_seq,
            rank=member.rank,
            incarnation=member.incarnation,
            num_workers=len(self._workers),
            servers=[server.address for server in self.members.of("server")],
        )

    def _give_up(self, peer: bytes, message: Leave) -> Outbox:
        """A member goes that has not been welcomed, or does not know it yet."""
        member = self.members.by_nonce(message.incarnation)
        if member is None:
            return [(peer, refuse(peer, message, UsageError(f"{message.node} is no member of this job")).reply)]
        if member.state is State.JOINED:
            self.members.withdraw(member)
            log.warning("a %s has left before all had joined: %s", member.role, message.error)
        else:
            self._leave(member, message)
        return [(peer, Ack(message.seq)), *self._flush(self._depart())]

    def _remind(self) -> None:
        """Say now and then who is missing."""
        if self._remind_at is None:
            self._remind_at = self._now + REMIND_S
        elif self._now >= self._remind_at:
            self._remind_at = self._now + REMIND_S
            log.warning("the scheduler waits for %s to join", self.members.absent())

    def _beat(self, peer: bytes, message: Beat) -> None:
        member = self.members.find(message.role, message.rank)
        if member is None or member.node != message.node or member.state is State.LOST:
            self._notices.append((peer, JobFailed(f"{message.node} is not a member of this job, or was given up")))
            return
        member.peer, member.heard = peer, self._now
        if self.failure is not None and member.state is State.READY:
            self._notices.append((peer, JobFailed(self.failure)))
        self._notices.append((peer, Alive()))
        self._tell(member)
        if member.role == "server" and self._epoch and self.failure is None:  # again, should the first have been lost
            self._notices.append((peer, self._news()))

    def _lost(self, message: Lost) -> None:
        member = self.members.find(message.role, message.rank)
        who = f"{message.role} {message.rank}" if message.role != "scheduler" else "the scheduler"
        if member is not None and not member.happens(Event.DIES) and member.state is State.LOST:
            return  # it was known
        self._fail(f"{who} {message.how}")

    def _leave(self, member: Member, message: Leave) -> None:
        if not member.happens(Event.LEAVES):
            return
        if message.error is not None:
            self._fail(f"{member.node} failed: {message.error}")
        elif member.role == "server" and not self.members.all_gone("worker"):
            self._fail(f"{member.node} has left while workers need it")
        member.left = self._now

    def _depart(self) -> list[Answer]:
        """Take note of workers that have left; tell the servers, and fail those who wait for them at a barrier."""
        gone = [m for m in self.members.of("worker") if m.state is State.LEFT]
        done = self.members.all_gone("worker")
        departed = {m.rank for m in gone if done or self._now - m.left >= self._farewell_s}
        if departed == self._departed or self.failure is not None:
            return []
        self._departed = departed
        self._epoch += 1
        for server in self.members.of("server"):
            if server.peer is not None:  # else its first beat brings it
                self._notices.append((server.peer, self._news()))
        return self._abandoned()

    def _news(self) -> Message:
        """What servers must know of workers that have left."""
        return Stop() if self.members.all_gone("worker") else Roster(self._epoch, sorted(self._departed))

    def _fail(self, text: str) -> None:
        """End the job: tell everybody who is still there why."""
        if self.failure is not None:
            return
        log.error("the job has failed: %s", text)
        text = text[:MAX_REASON]
        self.failure, self._failed_at = text, self._now
        for member in self.members.everyone:
            if member.state is State.READY and member.peer is not None:
                self._notices.append((member.peer, JobFailed(text)))
            elif member.state is State.JOINED:
                member.happens(Event.LEAVES)
                failed = Leave(member.role, member.hint, member.nonce, member.join_seq, 0, error=None)
                self._notices.append((member.join_peer, refuse(member.join_peer, failed, NodeLost(text)).reply))

    def _tell(self, member: Member) -> None:
        if member.peer is not None:  # else at its first beat
            self._notices += [(member.peer, notice) for notice in member.notices]
            member.notices.clear()

    # ---- requests of members

    def _serve(self, member: Member, peer: bytes, message: Request) -> list[Answer]:
        if isinstance(message, Leave):
            self._leave(member, message)
            answers = [Answer(peer, message, Ack(message.seq))]
            return answers + self._depart()
        if isinstance(message, Census):
            lost = sum(m.state is State.LOST for m in self.members.everyone)
            return [Answer(peer, message, Counted(message.seq, lost))]
        if self.failure is not None:
            raise NodeLost(self.failure)
        if message.role == "worker" and isinstance(message, OpenStore):
            return [Answer(peer, message, Opened(message.seq, self._stores.open(message.ordinal)))]
        if message.role == "worker" and isinstance(message, CloseStore):
            if self._stores.close(message.rank, message.store):
                self._keys.pop(message.store, Keys(self._loads)).forget()
                self._barriers.pop(message.store, None)
                self._joins.pop(message.store, None)
            return [Answer(peer, message, Ack(message.seq))]
        if message.role == "worker" and isinstance(message, Declare):
            outcomes, fault = self._keys_of(message.store).declare(peer, message)
            if fault is not None:
                owner = self.members.find("worker", 0)
                if owner is not None:
                    owner.notices.append(Fault(message.store, type(fault).__name__, str(fault)))
                    self._tell(owner)
            return _placed(outcomes) + self._abandoned()
        if message.role == "worker" and message.rank == 0 and isinstance(message, Ready):
            outcomes = self._keys_of(message.store).ready(message.keys)
            return [Answer(peer, message, Ack(message.seq)), *_placed(outcomes)]
        if message.role == "worker" and isinstance(message, Barrier):
            here = self._barriers.setdefault(message.store, Barriers(self._workers)).arrive(peer, message)
            return [Answer(whom, request, Ack(request.seq)) for whom, request in here] + self._abandoned()
        if message.role == "worker" and isinstance(message, Pause):
            self._joins.setdefault(message.store, Joins(self._workers)).arrive(message.rank, message.number)
            return [Answer(peer, message, Ack(message.seq)), *self._abandoned()]
        raise UsageError(f"a {type(message).__name__} is nothing for {message.node} to ask a scheduler")

    def _keys_of(self, store: int) -> Keys:
        return self._keys.setdefault(store, Keys(self._loads))

    def _abandoned(self) -> list[Answer]:
        """Fail those who wait for workers that have left: at a barrier, or for the first values of a key."""
        answers: list[Answer] = []
        for barriers in self._barriers.values():
            for peer, request, missing in barriers.abandon(self._departed):
                names = ", ".join(f"worker {rank}" for rank in sorted(missing))
                answers.append(
                    refuse(peer, request, NodeLost(f"{names} has left the job without coming to the barrier"))
                )
        if 0 in self._departed:
            gone = NodeLost("worker 0 has left the job without giving these keys their first values")
            answers += _placed([(asker, gone) for keys in self._keys.values() for asker in keys.abandon()])
        return answers + self._joined()

    def _joined(self) -> list[Answer]:
        """Fail those who wait in the same way for workers inside ``join``, who are let out after all others' calls."""
        answers: list[Answer] = []
        for store, joins in self._joins.items():
            inside = joins.inside(self._departed)
            if inside and store in self._barriers:
                for peer, request, missing in self._barriers[store].abandon(inside):
                    names = ", ".join(f"worker {rank}" for rank in sorted(missing))
                    error = UsageError(f"{names} has joined, and comes to no barrier until all workers have")
                    answers.append(refuse(peer, request, error))
            if 0 in inside and store in self._keys:
                stuck = UsageError("worker 0 has joined, and gives no key its first value until all workers have")
                answers += _placed([(asker, stuck) for asker in self._keys[store].abandon()])
        return answers

    def _explain(self, message: Explain) -> str:
        joining = self.members.by_nonce(message.incarnation)
        if joining is not None and not self.members.complete:
            return f"waits for {self.members.absent()} to join"
        for explain in [*(k.explain for k in self._keys.values()), *(b.explain for b in self._barriers.values())]:
            text = explain(message.rank, message.about)
            if text:
                return text
        return ""

    # ---- answers

    def _answers(self, peer: bytes, message: Request, serve: Callable[..., list[Answer]]) -> list[Answer]:
        try:
            return serve(peer, message)
        except Exception as exc:
            if not isinstance(exc, UsageError | WireError | NodeLost):
                log.exception("a request of %s failed", message.node)
            return [refuse(peer, message, exc)]

    def _flush(self, answers: list[Answer]) -> Outbox:
        """Note the answers for repeats, and return them with the notices that have come up."""
        for _, request, reply in answers:
            self._ledger.note(request, reply)
        outbox = self._senders.outbox(answers) + self._notices
        self._notices = []
        return outbox


def _placed(outcomes: list[Outcome]) -> list[Answer]:
    return [
        refuse(asker.peer, asker.request, outcome)
        if isinstance(outcome, Exception)
        else Answer(asker.peer, asker.request, Placed(asker.request.seq, outcome))
        for asker, outcome in outcomes
    ]
