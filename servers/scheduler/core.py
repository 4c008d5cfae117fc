"""The core of the scheduler: messages and the time in, messages out; how members join. No I/O."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence, Set

from kvstore import wire
from kvstore.errors import NodeLost, UsageError, WireError
from kvstore.job.contract import process_name
from kvstore.shares import Shares
from kvstore.transport.transport import Admission
from servers.requests.reasons import Reason
from servers.requests.repeats import Ledger, Verdict
from servers.requests.replies import Answer, Outbox, refuse
from servers.requests.reply_links import ReplyLinks, turn_away
from servers.scheduler.deadlocks import Deadlocks
from servers.scheduler.departures import Departures, Rosters
from servers.scheduler.failover import Failover
from servers.scheduler.guests import Readers
from servers.scheduler.heartbeats import Heartbeats
from servers.scheduler.losses import JobFailure, Losses
from servers.scheduler.members import JobMember, MemberEvent, Members, MemberState, Welcomes
from servers.scheduler.newcomers import Newcomers, Shortage
from servers.scheduler.observing import Observing
from servers.scheduler.stores import Stores

log = logging.getLogger(__name__)


REMIND_S = 60.0  # between two log lines that name the members that have not joined yet


class JoinRequests:
    """The requests to join one job."""

    def __init__(
        self,
        members: Members,
        reply_links: ReplyLinks,
        failover: Failover,
        tell: Callable[[bytes, wire.Message], None],
    ) -> None:
        self._members = members
        self._reply_links = reply_links
        self._failover = failover
        self._tell = tell
        self._welcomes: Welcomes | None = None  # once all have joined
        self._remind_at: float | None = None

    @property
    def servers(self) -> list[str]:
        """The address of the process that serves each server's rank, as it is now; empty until all have joined."""
        return [] if self._welcomes is None else self._welcomes.servers

    def predecessor(self, peer: bytes, request: wire.Join) -> JobMember | None:
        """Return the member that a later start in the same seat (``request``) shows to have ended; None if none has."""
        role, rank, _ = request.node
        before = self._members.find(role, rank) if self._members.starts_again(role) else None
        if before is None or before.start >= request.start or before.key != self._reply_links.key(peer):
            return None
        return before

    def join(self, peer: bytes, request: wire.Join, now: float) -> None:
        """Let a process in, or welcome it once more if it has asked again; ``UsageError`` says why it may not join."""
        role, hint, nonce = request.node
        member = self._members.by_nonce(nonce)
        if member is not None:
            if not self._reply_links.admit(peer, request, member.key):
                raise UsageError("a process with another key has asked to join in this name")
            member.join_peer, member.join_seq = peer, request.seq
            self._welcome(member)
            return
        key = self._reply_links.key(peer)
        member = JobMember(
            role,
            nonce,
            hint,
            request.address,
            peer,
            request.seq,
            key,
            request.aggregator,
            request.start,
            request.host,
            request.pid,
        )
        self._members.join(member, now)
        self._reply_links.admit(peer, request, key)
        if member.state is MemberState.READY:
            if role == "worker":
                member.aggregator = -1  # its host's aggregator goes on without it: it sends to the servers
            self._welcome(member)
            if member.role != "worker" and not self._members.all_gone("worker"):
                self._failover.join(member, now)
        elif self._members.settle(now):
            log.info("all members have joined")
            self._welcomes = Welcomes(self._members)
            self._failover.begin(self._welcomes)
            for other in self._members.everyone:
                self._welcome(other)

    def withdraw(self, member: JobMember, request: wire.Leave) -> None:
        self._members.withdraw(member)
        self._reply_links.forget(wire.Node(member.role, member.hint, member.nonce))
        log.warning("a %s has left before all had joined: %s", member.role, request.error)

    def remind(self, now: float) -> None:
        """Log, now and then, which members have not joined yet."""
        if self._remind_at is None:
            self._remind_at = now + REMIND_S
        elif now >= self._remind_at:
            self._remind_at = now + REMIND_S
            log.warning("the scheduler waits for %s to join", self._members.absent())

    def _welcome(self, member: JobMember) -> None:
        if self._welcomes is not None:
            self._tell(member.join_peer, self._welcomes.of(member))


class Scheduler:
    """The scheduler of one job.

    Args:
        limit_s: after how many seconds of silence a member is lost.
        farewell_s: how many seconds after a worker has left the others are told; see ``Departures``.
        key: the scheduler's own public key; empty where links prove no keys. Likewise ``reader_key``, ``observer_key``.
        replicas: how many standbys each server has.
        readers: how many readers there may be at once; 0 for none.
        start: how often the scheduler has been started.
        min_workers: the job goes on without workers that are lost as long as so many are not; 0 if it does not at all.
        patience_s: how long it waits below that for workers that come; 0 if none does.
        max_workers: so many there may be with those that are added while the job runs.

    Attributes:
        silent: the members that the last tick has found overdue, each with the time of its last sign of life.
    """

    def __init__(
        self,
        num_workers: int,
        num_servers: int,
        limit_s: float,
        farewell_s: float = 0.0,
        admission: Admission | None = None,
        key: str = "",
        num_aggregators: int = 0,
        replicas: int = 0,
        readers: int = 0,
        reader_key: str = "",
        observer_key: str = "",
        start: int = 1,
        min_workers: int = 0,
        patience_s: float = 0.0,
        max_workers: int = 0,
    ) -> None:
        self.members = Members(
            *(num_workers, num_servers, limit_s, num_aggregators, replicas),
            news=lambda line: self.observing.events.add(self._now, line),
            spares_workers=min_workers > 0,
            max_workers=max_workers,
        )
        self.silent: list[tuple[wire.Node, float]] = []
        self._now = self._ticked = 0.0
        self._departures = Departures(farewell_s, range(num_workers, max_workers))
        self._stores = Stores(range(num_workers), num_servers, self._departures)
        self.ledger: Ledger[wire.Reply] = Ledger()
        self._reply_links = ReplyLinks(admission)
        self._notices: Outbox = []
        self._failure = JobFailure(self.members, self._send, lambda now, line: self.observing.events.add(now, line))
        self._failover = Failover(self.members, self._send)
        self._joining = JoinRequests(self.members, self._reply_links, self._failover, self._send)
        self._rosters = Rosters(self._send)
        self._deadlocks = Deadlocks()
        self._losses = Losses(
            *(self.members, self._reply_links, self._failover, key, self._failure),
            min_workers,
            self._go_on_without,
            self._departures,
            patience_s > 0,
            max_workers > 0,
        )
        self._shares = Shares()
        self._newcomers = Newcomers(self.members, self._departures, self._send)
        self._shortage = Shortage(self.members, self._departures, self._newcomers, min_workers, patience_s)
        self._released: list[Answer] = []  # to members that have waited for one that is lost
        self._heartbeats = Heartbeats(
            self.members,
            self._reply_links,
            self._failover,
            self._rosters,
            self._send,
            self._failure,
            self._newcomers,
            start,
        )
        self._readers = (
            Readers(readers, reader_key, admission, self._stores, lambda: self._joining.servers, self._over)
            if readers
            else None
        )
        self.observing = Observing(
            *(self.members, self._reply_links, self._heartbeats, self._send, observer_key, admission),
            self._failure,
            self._waits,
            start,
        )

    def handle(self, peer: bytes, message: wire.Message, now: float) -> Outbox:
        """Return what to send, and to whom, because ``message`` came from ``peer``."""
        self._set_time(now)
        if self._readers is not None and self._readers.links.concerns(peer, message):
            return self._readers.handle(peer, message, now)
        if self.observing.links.concerns(peer, message):
            return self.observing.handle(peer, message, now) + self._flush([])
        if self.observing.take(peer, message, now):
            return self._flush([])
        if isinstance(message, wire.Beat):
            self._heartbeats.beat(peer, message, now)
            return self._flush([])
        if isinstance(message, wire.ProcessAlive):
            self._heartbeats.pulse(peer, message, now)
            return []
        if isinstance(message, wire.Standing):
            self._losses.stand(peer, message, now)
            return self._flush([])
        if isinstance(message, wire.Stuck):
            self._look_for_deadlock(peer, message)
            return self._flush([])
        if isinstance(message, wire.Lost):
            self._losses.report(peer, message, now)
            return self._flush([])
        if isinstance(message, wire.Retire):
            self._losses.retire(peer, message, now)
            return self._flush([])
        if not isinstance(message, wire.Request) and not isinstance(message, wire.Here):
            log.debug("dropped a %s, which the scheduler does not handle", type(message).__name__)
            return []
        if isinstance(message, wire.Explain):
            return [(peer, self._explain(message).reply(message.seq))]
        if isinstance(message, wire.Join):  # not in the ledger: without a rank, a sender is not identified
            return self._flush(self._answers(peer, message, self._join))
        if isinstance(message, wire.Leave) and message.node.rank < 0:
            return self._give_up(peer, message)
        member = self.members.identify(message.node)
        if member is None:  # before the ledger, for strangers must not fill it
            return turn_away(peer, message, "is not a member of this job")
        if not self._reply_links.admit(peer, message, member.key):
            return turn_away(peer, message, "joined this job with another key than that of this link")
        if isinstance(message, wire.Here):
            return []
        if isinstance(message, wire.Locate):  # not in the ledger: it changes nothing, and its answer may be long
            self.observing.inquiries.locate(peer, message, now)
            return self._flush([])
        verdict = self.ledger.admit(message)
        if verdict is not Verdict.NEW:
            return self._reply_links.again(peer, message, self.ledger) if verdict is Verdict.REPEAT else []
        return self._flush(self._answers(peer, message, functools.partial(self._serve, member)))

    def tick(self, now: float) -> Outbox:
        """Return what to send because time has passed. Call it when no message waits to be handled."""
        self._set_time(now)
        if now - self._ticked > self.members.limit_s / 2:  # this process was stopped, and may have missed heartbeats
            self.members.forgive(now)
        self._ticked = now
        overdue = self.members.overdue(now)
        self.silent = [(member.node, member.heard) for member in overdue]
        for member in overdue:
            self._losses.silent(member, now)
        if not self.members.complete and self.failure is None:
            self._joining.remind(now)
        why = self._shortage.overdue(now) if self.failure is None else ""
        if why:
            self._failure.happen(why, now, self._latest_loss())
        self.observing.tick(now)
        return self._flush(self._depart())

    def due(self) -> float | None:
        """Return when ``tick`` has something to do that cannot wait for its interval; None if it has not."""
        return self.observing.due()

    def tick_again(self, now: float, silent: Sequence[tuple[wire.Node, float]]) -> Outbox:
        """Repeat a tick that was logged, in which ``silent`` were overdue, and nobody else; see that attribute."""
        self._ticked = now
        self.members.forgive(now)
        for node, heard in reversed(silent):
            self.members.recall(node, heard)
        return self.tick(now)

    def resume(self, now: float) -> None:
        """Go on after the inputs of an earlier process: what nobody could hear since then was no silence."""
        self._now = self._ticked = now
        self.members.forgive(now)
        self.take_news()  # the earlier process has said it

    @property
    def lost_workers(self) -> Set[int]:
        """The ranks of the workers that are lost, and without which the job goes on, at any time."""
        return self._departures.lost.keys()

    @property
    def given_up(self) -> list[str]:
        """See ``Losses.given_up``."""
        return self._losses.given_up

    @property
    def failure(self) -> str | None:
        return self._failure.text

    @property
    def cause(self) -> str:
        """The process of a server or standby whose loss has failed the job, by name; empty if there is none."""
        return self._failure.cause

    @property
    def epoch(self) -> int:
        return self._rosters.epoch

    @property
    def finished(self) -> bool:
        """Whether no member needs the scheduler any more."""
        if self.failure is not None and self._now - self._failure.at > self.members.limit_s:
            return True
        started = self.members.complete or (self.failure is not None and len(self.members) > 0)
        return started and not self.members.present

    @property
    def to_be_seen(self) -> bool:
        """Whether the job has failed, and an observer that looks regularly does not know yet: it will at once."""
        return self.failure is not None and self.observing.unaware(self._failure.at, self._now)

    def take_news(self) -> list[str]:
        """Return the lines for the user that have come up since the last call."""
        news = self._failover.take_news() + self._losses.take_news() + self.observing.take_news()
        for line in news:
            self.observing.events.add(self._now, line)
        return news

    # ---- members

    def _join(self, peer: bytes, message: wire.Join) -> list[Answer]:
        self._failure.check()
        before = self._joining.predecessor(peer, message)
        role, rank, nonce = message.node
        again = "has been started again"
        if before is not None and role != "worker":
            self._losses.end(wire.Lost(role, rank, again, before.start), self._now)
        elif before is not None and not self.members.all_gone("worker"):
            self._losses.spare(before, again)
        if role == "worker" and self.members.by_nonce(nonce) is None and self.members.all_gone("worker"):
            raise NodeLost("the job has ended: all other workers have left")
        self._joining.join(peer, message, self._now)
        member = self.members.by_nonce(message.node.incarnation)
        if member is not None and member.role == "worker" and member.incarnation > 1 and self._losses.comes(member):
            self._departures.come(member.rank, member.incarnation, member.key)
            self._announce(over=False)
        return []

    def _give_up(self, peer: bytes, message: wire.Leave) -> Outbox:
        """Let a member go that has not been welcomed, or does not know it yet."""
        member = self.members.by_nonce(message.node.incarnation)
        if member is None or self._reply_links.key(peer) != member.key:
            return turn_away(peer, message, "is not a member of this job")
        answers: list[Answer] = []
        if member.state is MemberState.JOINED:
            self._joining.withdraw(member, message)
        else:
            answers = self._leave(member, message)
        return [(peer, wire.Ack(message.seq)), *self._flush(answers)]

    def _over(self) -> NodeLost | None:
        """Return why there is nothing more to read; None if there may be."""
        if self.failure is not None:
            return NodeLost(self.failure, self.cause)
        return NodeLost("the job has ended: all workers have left") if self.members.all_gone("worker") else None

    def changes_nothing(self, peer: bytes, message: wire.Message) -> bool:
        """Return whether ``message`` is a reader's or an observer's, so that it changes nothing, whatever it is."""
        if self._readers is not None and self._readers.links.concerns(peer, message):
            return True
        return self.observing.links.concerns(peer, message)

    def _leave(self, member: JobMember, message: wire.Leave) -> list[Answer]:
        if message.error is not None and self._losses.spare(member, f"failed: {message.error}"):
            return []
        early = member.role == "aggregator" and message.error is None and not self.members.all_gone("worker")
        if early and self._losses.spare(member, "has left"):
            return []
        if not self.members.happens(member, MemberEvent.LEAVES):
            return []
        if member.role == "worker":
            if member.rank not in self._departures.lost:  # else nobody has waited for it since it was started again
                self._departures.add(member.rank, self._now)
            self._released += self._newcomers.leave(member.rank)
        if self.members.restarts(member.role):
            how = "has left" if message.error is None else f"failed: {message.error}"
            self._losses.lose(member, how, self._now)
        elif message.error is not None:
            self._failure.happen(f"{member.node} failed: {message.error}", self._now)
        elif member.role != "worker" and not self.members.all_gone("worker"):
            self._failure.happen(f"{member.node} has left while workers need it", self._now)
        return self._depart() if self.members.all_gone("worker") else []

    def _depart(self) -> list[Answer]:
        """Tell servers and aggregators which workers have left, and fail the requests that wait for them.

        A tick does this for all departures since the last one, so each gets one message for thousands of them.
        """
        if self.failure is not None:
            return []
        done = self.members.all_gone("worker")
        ranks = self._departures.due(self._now, all_gone=done)
        if not ranks and done == self._rosters.over:
            return []
        self._announce(over=done)
        return self._stores.depart(ranks)

    def _go_on_without(self, member: JobMember) -> None:
        """Tell others of a worker or an aggregator that is lost, and answer those that have waited for it alone."""
        if member.role == "aggregator":
            self._departures.aggregators.add(member.rank)
            self._announce(over=False)
            return
        self._departures.lose(member.rank, member.incarnation)
        self._shares.lose(member.rank)  # before anybody goes on without it, and asks whether its samples are left
        self._announce(over=self.members.all_gone("worker"))
        self._released += self._stores.lose(member.rank)
        if len(self._departures.lost) == self.members.wanted["worker"]:
            why = "is lost, and no worker is left that could let those in that were started again"
            self._failure.happen(f"{member.node} {why}", self._now, process_name(*member.node[:2], member.start))
            return
        for newcomer in self._newcomers.lose(member.rank):
            # Some servers may have been told to wait for its pushes, and others not: it has to come anew.
            other = self.members.find("worker", newcomer)
            how = f"was about to be let in by {member.node}, which is lost"
            self._released += self._newcomers.give_up(newcomer, NodeLost(f"worker {newcomer} {how}"))
            if other is not None and not self._losses.spare(other, how):
                self._failure.happen(f"{other.node} {how}", self._now)

    def _latest_loss(self) -> str:
        """Return the name of the process of a worker that was lost last."""
        rank = next(reversed(self._departures.lost))
        member = self.members.find("worker", rank)
        return process_name("worker", rank, 1 if member is None else member.start)

    def _let_in(self, peer: bytes, message: wire.Admitted) -> list[Answer]:
        """A worker that was started again is in the rounds of all servers."""
        done = [Answer(peer, message, wire.Ack(message.seq))]
        answer = self._newcomers.admitted(message)
        if answer is None:
            return done
        self._departures.admit(message.rank)
        self._announce(over=False)
        return [*done, *self._stores.admit(message), answer]

    def _announce(self, *, over: bool) -> None:
        self._rosters.change(self._departures, over=over)
        for role in ("server", "standby", "aggregator", *(["worker"] if self._rosters.of_losses else [])):
            for member in self.members.of(role):
                self._rosters.inform(member)

    def _send(self, peer: bytes, notice: wire.Message) -> None:
        self._notices.append((peer, notice))

    # ---- requests of members

    def _serve(self, member: JobMember, peer: bytes, message: wire.Request) -> list[Answer]:
        if isinstance(message, wire.Leave):
            return [Answer(peer, message, wire.Ack(message.seq)), *self._leave(member, message)]
        if isinstance(message, wire.Census):
            return [Answer(peer, message, wire.Counted(message.seq, self.members.lost))]
        self._failure.check()
        if member.role == "worker" and member.state is MemberState.LOST:  # nobody counts on what it does
            raise NodeLost(f"{member.node} {wire.GIVEN_UP}")
        if isinstance(message, wire.TakeShare):
            asked = message.data, message.epoch, message.size, message.most, message.used, message.passes
            share = self._shares.take(member.rank, *asked)
            return [Answer(peer, message, wire.ShareTaken(message.seq, *share))]
        if isinstance(message, wire.Enter):
            return self._newcomers.enter(peer, message)
        if isinstance(message, wire.Admitted):
            return self._let_in(peer, message)
        if isinstance(message, wire.AwaitWorkers):
            return self._shortage.wait(peer, message)
        served = self._stores.serve(peer, message, self._now)
        if served is None:
            raise UsageError(f"the scheduler does not handle a {type(message).__name__} of {message.node}")
        answers, fault = served
        if fault is not None:
            self._heartbeats.blame(fault)
        return answers

    def _look_for_deadlock(self, peer: bytes, message: wire.Stuck) -> None:
        """Take what a worker says of its waits, and have workers that wait for each other raise errors.

        Nothing of it is logged: workers that still wait when the scheduler has been started again will say it again.
        """
        if message.node.role != "worker" or not self._heartbeats.is_from_member(peer, message):
            return
        for rank, notice in self._deadlocks.take(message):
            member = self.members.find("worker", rank)
            if member is not None and member.peer is not None:
                self._send(member.peer, notice)

    def _explain(self, message: wire.Explain) -> Reason:
        joining = self.members.by_nonce(message.node.incarnation)
        if joining is not None and not self.members.complete:
            return Reason(f"waits for {self.members.absent()} to join")
        if message.node.role != "worker":
            return Reason()
        rank, about = message.node.rank, message.about
        reasons = (each.explain(rank, about) for each in (self._newcomers, self._shortage))
        return next((reason for reason in reasons if reason.text), None) or self._stores.explain(rank, about)

    def _waits(self) -> Reason:
        if not self.members.complete:
            return Reason(f"waits for {self.members.absent()} to join")
        return Reason() if self.failure is not None else self._stores.waits(self._now)

    def _set_time(self, now: float) -> None:
        self._now = now
        self.observing.begin(now)

    # ---- answers

    def _answers(self, peer: bytes, message: wire.Request, serve: Callable[..., list[Answer]]) -> list[Answer]:
        try:
            return serve(peer, message)
        except Exception as exc:
            if not isinstance(exc, UsageError | WireError | NodeLost):
                log.exception("a request of %s failed", message.node)
            return [refuse(peer, message, exc)]

    def _flush(self, answers: list[Answer]) -> Outbox:
        """Remember the answers for repeats, and return them with the notices that have come up."""
        self._released += self._shortage.look(self._now)
        if self._released:
            answers, self._released = answers + self._released, []
        for _, request, reply in answers:
            self.ledger.note(request, reply)
        outbox = self.observing.alerts() + self._reply_links.outbox(answers) + self._notices
        self._notices = []
        return outbox
