"""How the job is, as the scheduler knows it: events, reports, places in the code, a straggler, and who asks. Pure.

Nothing here changes the job, and nothing is logged: a scheduler that has been started again begins anew with it.
Observers are no members: nobody waits for them, and nothing is lost with them. A scheduler that has been started again
does not know them, and answers them all the same.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvstore import wire
from kvstore.errors import KVStoreError, UsageError
from kvstore.transport.base import Admission
from kvstore.wire.guests import MOST_EVENTS
from servers.requests.guest_links import GuestLinks
from servers.requests.reasons import Reason
from servers.requests.replies import Outbox, refuse
from servers.requests.reply_links import ReplyLinks
from servers.scheduler.beats import Beats
from servers.scheduler.failure import JobFailure
from servers.scheduler.inquiries import Inquiries
from servers.scheduler.members import JobMember, Members
from servers.scheduler.straggling import Reports, StragglerWatch
from servers.scheduler.traces import Traces

OBSERVER = "observer"  # the role of those who look on
MOST_OBSERVERS = 8
LOOK_S = 2.0  # who looks on regularly does so within this time
NOTHING = 0  # the number of no request
SILENT_S = 30.0  # observers ask more often; who does not is not counted any more


class Events:
    """The latest events of one job. They are numbered from 1 on."""

    def __init__(self) -> None:
        self._lines: deque[tuple[float, str]] = deque(maxlen=MOST_EVENTS)
        self._count = 0

    def add(self, now: float, text: str) -> None:
        """Note that something has happened."""
        self._lines.append((now, text[: wire.MAX_REASON]))
        self._count += 1

    def after(self, number: int) -> tuple[int, list[list[Any]]]:
        """Return those after event ``number`` that are kept, each as its time and a line, behind the first's number.

        If there is no event ``number`` yet, it was one of a scheduler before this, and all are returned.
        """
        first = self._count - len(self._lines) + 1
        skipped = min(max(0, number + 1 - first), len(self._lines)) if number <= self._count else 0
        return first + skipped, [[at, text] for at, text in itertools.islice(self._lines, skipped, None)]


@dataclass
class JobState:
    """What the scheduler tells observers, beside its members.

    Attributes:
        events: what has happened.
        failure: returns why the job has failed; None if it has not.
        waits: returns what members wait for at the scheduler.
        reports: returns the reports of a member, the older first.
        locate: takes a ``Locate``, which is answered later.
        trace: returns what members have noted for the job's trace.
        leaves: is told the random number of an observer that has left.
        started: when the scheduler began; None before its first message or tick.
    """

    events: Events
    failure: Callable[[], str | None]
    waits: Callable[[], Reason]
    reports: Callable[[JobMember], Sequence[wire.Message]]
    locate: Callable[[bytes, wire.Locate, float], None]
    trace: Callable[[wire.FetchTrace, float], wire.TraceFetched]
    leaves: Callable[[int], None]
    started: float | None = None


class Observers:
    """See the module.

    Args:
        key, admission: see ``GuestLinks``.
        members: of the job.
        job: what else is known of it.
        most: how many observers there may be at once.
    """

    def __init__(
        self, key: str, admission: Admission | None, members: Members, job: JobState, most: int = MOST_OBSERVERS
    ) -> None:
        # Links that are not gone yet may be more: their observer has made another.
        self.links = GuestLinks(
            OBSERVER, (wire.Observe, wire.Locate, wire.FetchTrace), "looking on", 2 * most, key, admission
        )
        self._members = members
        self._job = job
        self._most = most
        self._heard: OrderedDict[int, float] = (
            OrderedDict()
        )  # by the observer's random number, the longest silent first

    def handle(self, peer: bytes, message: wire.Message, now: float) -> Outbox:
        """Return what to send, and to whom, because ``message``, which concerns observers, came from ``peer``."""
        refusal = self.links.refusal(peer, message)
        if refusal is not None or not isinstance(message, wire.Request):
            return refusal or []
        try:
            if isinstance(message, wire.Locate):
                self._hear(message.node.incarnation, now)
                self._job.locate(peer, message, now)
                return []
            return [(peer, self._serve(message, now))]
        except KVStoreError as exc:
            return [(peer, refuse(peer, message, exc).reply)]

    def alerts(self) -> Outbox:
        """Return what lets all observers look at once: an answer to nothing, which ends their pause."""
        return [(peer, wire.Ack(NOTHING)) for peer in self.links]

    def unaware(self, since: float, now: float) -> bool:
        """Whether an observer that looks regularly has not looked since a moment, and may do so yet."""
        return now - since < LOOK_S and any(since - LOOK_S <= heard < since for heard in self._heard.values())

    def _serve(self, message: wire.Request, now: float) -> wire.Reply:
        if isinstance(message, wire.Leave):
            self._heard.pop(message.node.incarnation, None)
            self._job.leaves(message.node.incarnation)
            return wire.Ack(message.seq)
        if isinstance(message, wire.Explain):
            return wire.Explanation(message.seq, "")
        if isinstance(message, wire.FetchTrace):
            self._hear(message.node.incarnation, now)
            return self._job.trace(message, now)
        assert isinstance(message, wire.Observe)  # noqa: S101 (for the type checker: the links let nothing else pass)
        self._hear(message.node.incarnation, now)
        return self._observed(message, now)

    def _hear(self, nonce: int, now: float) -> None:
        """Note that an observer was heard.

        Raises:
            UsageError: there are too many.
        """
        while self._heard and now - next(iter(self._heard.values())) > SILENT_S:
            self._heard.popitem(last=False)
        if nonce not in self._heard and len(self._heard) >= self._most:
            raise UsageError(f"the job has its {self._most} observers already; close one, and ask again")
        self._heard[nonce] = now
        self._heard.move_to_end(nonce)

    def _observed(self, message: wire.Observe, now: float) -> wire.Observed:
        wanted = self._members.wanted
        everyone = self._members.everyone
        reports = [self._job.reports(member) for member in everyone]
        waits = self._job.waits()
        first, events = self._job.events.after(message.after)
        return wire.Observed(
            message.seq,
            now,
            now if self._job.started is None else self._job.started,
            [wanted[role] for role in ("worker", "server", "standby", "aggregator")],
            [_record(member, now) for member in everyone],
            self._job.failure(),
            waits.text[: wire.MAX_REASON],
            first,
            events,
            [place for place, made in enumerate(reports) for _ in made],
            sorted(waits.missing),
            [wire.encode(report)[0] for made in reports for report in made],
        )


def _record(member: JobMember, now: float) -> list[object]:
    """Return what ``Observed.members`` has of a member; before it has a rank, the one it has asked for."""
    rank = member.hint if member.rank < 0 else member.rank
    silent_s = max(0.0, now - member.heard) if member.heard else 0.0
    state = member.state.name.lower()
    return [
        *(member.role, max(-1, rank), member.incarnation, state, silent_s),
        *(member.address, member.host, member.pid),
    ]


class Observing:
    """See the module.

    Args:
        members: of the job.
        reply_links: of the members.
        beats: knows which links are members'.
        send: sends a message over a link.
        key, admission: see ``Observers``.
        failure: of the job.
        waits: returns what members wait for at the scheduler.
        start: how often the scheduler has been started.

    Attributes:
        events: what has happened.
        reports: what members report of themselves.
        inquiries: the questions where members are in their code.
        traces: what members have noted for the job's trace; None until there is to be one.
    """

    def __init__(
        self,
        members: Members,
        reply_links: ReplyLinks,
        beats: Beats,
        send: Callable[[bytes, wire.Message], None],
        key: str,
        admission: Admission | None,
        failure: JobFailure,
        waits: Callable[[], Reason],
        start: int = 1,
    ) -> None:
        self.events = Events()
        self.reports = Reports()
        self.inquiries = Inquiries(members, reply_links, send)
        self.traces: Traces | None = None
        self._members = members
        self._reply_links = reply_links
        self._news: list[str] = []
        self._deaths = 0  # of which observers have heard
        self._stragglers = StragglerWatch(members, self.reports, self.inquiries.look, self._news.append)
        self._beats = beats
        self._failure = failure
        self._start = start
        self._job = JobState(
            self.events,
            lambda: failure.text,
            waits,
            lambda member: self.reports.of(member.node),
            self.inquiries.locate,
            self._fetch_trace,
            lambda reader: None if self.traces is None else self.traces.release(reader),
        )
        self._observers = Observers(key, admission, members, self._job)

    def concerns(self, peer: bytes, message: wire.Message) -> bool:
        """Return whether ``message`` is an observer's."""
        return self._observers.links.concerns(peer, message)

    def handle(self, peer: bytes, message: wire.Message, now: float) -> Outbox:
        """Return what to send, and to whom, because ``message``, which concerns observers, came from ``peer``."""
        return self._observers.handle(peer, message, now)

    def take(self, peer: bytes, message: wire.Message, now: float) -> bool:
        """Take what a member says of itself; return whether ``message`` is such a notice."""
        if isinstance(message, wire.WorkerReport | wire.ServerReport):
            if self._beats.is_from_member(peer, message):
                self.reports.take(message, now)
        elif isinstance(message, wire.TraceChunk):
            self._note_trace(peer, message)
        elif isinstance(message, wire.Stacks):
            self.inquiries.take(peer, message, now)
        else:
            return False
        return True

    def locate(self, peer: bytes, message: wire.Locate, now: float) -> None:
        """Take a member's question where others are; it is answered later."""
        self.inquiries.locate(peer, message, now)

    def begin(self, now: float) -> None:
        """Note the time of the scheduler's first message or tick. Later calls change nothing."""
        if self._job.started is None:
            self._job.started = now

    def tick(self, now: float) -> None:
        """Answer questions whose time is over, and look for a straggler."""
        self.inquiries.tick(now)
        if self._failure.text is None:
            self._stragglers.tick(now)

    def due(self) -> float | None:
        """Return when ``tick`` has something to do that cannot wait for its interval; None if it has not."""
        times = [due for due in (self.inquiries.due(), self._stragglers.due()) if due is not None]
        return min(times, default=None)

    def unaware(self, since: float, now: float) -> bool:
        """Whether an observer that looks regularly has not looked since a moment, and may do so yet."""
        return self._observers.unaware(since, now)

    def alerts(self) -> Outbox:
        """Return what has observers look at once, if a member has died or the job has failed.

        It is sent before all else: members that hear of a failure end, and that takes all cores for seconds.
        """
        deaths = self._members.lost + (self._failure.text is not None)
        if deaths == self._deaths:
            return []
        self._deaths = deaths
        return self._observers.alerts()

    def take_news(self) -> list[str]:
        """Return the lines for the user that have come up since the last call."""
        news = list(self._news)
        self._news.clear()
        return news

    def _note_trace(self, peer: bytes, chunk: wire.TraceChunk) -> None:
        """Keep what a member has noted, also one that has left: its last chunk may come behind that."""
        member = self._members.identify(chunk.node)
        if self.traces is not None and member is not None and self._reply_links.admit(peer, chunk, member.key):
            self.traces.take(chunk)

    def _fetch_trace(self, message: wire.FetchTrace, now: float) -> wire.TraceFetched:
        if self.traces is None:
            if not message.traced[1]:
                raise UsageError("this job has no trace; kvstore-status --trace FILE begins one")
            self.traces = Traces(now, self._start)
        self.traces.admit(message, now)
        if message.traced[1] and message.traced != self._beats.traced:
            if message.traced[0] != self._beats.traced[0]:
                self.traces.begin()
            self._beats.trace(message.traced)
        return self.traces.fetch(message, now)
