"""How the job is, as the scheduler knows it: events, reports, places in the code, a straggler, and observers. Pure.

Nothing here changes the job, and nothing is logged: a scheduler that has been started again begins anew with it.
Observers are no members: nobody waits for them, and nothing is lost with them. A scheduler that has been started again
does not know them, and answers them all the same.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from typing import Any

from kvstore import wire
from kvstore.errors import UsageError
from kvstore.transport.transport import Admission
from kvstore.wire.guests import MOST_EVENTS
from servers.requests.guest_links import GuestLinks
from servers.requests.reasons import Reason
from servers.requests.replies import Outbox
from servers.requests.reply_links import ReplyLinks
from servers.scheduler.guests import Guests
from servers.scheduler.heartbeats import Heartbeats
from servers.scheduler.inquiries import Inquiries
from servers.scheduler.losses import JobFailure
from servers.scheduler.members import JobMember, Members
from servers.scheduler.straggling import Reports, StragglerWatch
from servers.scheduler.traces import Traces

OBSERVER = "observer"  # the role
MOST_OBSERVERS = 8
LOOK_S = 2.0  # an observer that looks regularly does so within this time
NOTHING = 0  # the number of no request
SILENT_S = 30.0  # observers ask more often; a silent one is not counted any more


class Events:
    """The latest events of one job. They are numbered from 1 on."""

    def __init__(self) -> None:
        self._lines: deque[tuple[float, str]] = deque(maxlen=MOST_EVENTS)
        self._count = 0

    def add(self, now: float, text: str) -> None:
        self._lines.append((now, text[: wire.MAX_REASON]))
        self._count += 1

    def after(self, number: int) -> tuple[int, list[list[Any]]]:
        """Return the kept events after ``number``, each as its time and a line, behind the first's number.

        If there is no event ``number`` yet, it was one of a scheduler before this, and all are returned.
        """
        first = self._count - len(self._lines) + 1
        skipped = min(max(0, number + 1 - first), len(self._lines)) if number <= self._count else 0
        return first + skipped, [[at, text] for at, text in itertools.islice(self._lines, skipped, None)]


class Observing(Guests):
    """How one job is, and its observers. ``waits`` returns what members wait for at the scheduler."""

    def __init__(
        self,
        members: Members,
        reply_links: ReplyLinks,
        heartbeats: Heartbeats,
        send: Callable[[bytes, wire.Message], None],
        key: str,
        admission: Admission | None,
        failure: JobFailure,
        waits: Callable[[], Reason],
        start: int = 1,
    ) -> None:
        # Links that are not gone yet may be more: their observer has made another.
        links = GuestLinks(
            OBSERVER, (wire.Observe, wire.Locate, wire.FetchTrace), "looking on", 2 * MOST_OBSERVERS, key, admission
        )
        super().__init__(links, MOST_OBSERVERS, "observers already", SILENT_S)
        self.events = Events()
        self.reports = Reports()
        self.inquiries = Inquiries(members, reply_links, send)
        self.traces: Traces | None = None
        self._members = members
        self._reply_links = reply_links
        self._news: list[str] = []
        self._deaths = 0  # of which observers have heard
        self._stragglers = StragglerWatch(members, self.reports, self.inquiries.look, self._news.append)
        self._heartbeats = heartbeats
        self._failure = failure
        self._start = start
        self._waits = waits
        self._started: float | None = None  # the time of the scheduler's first message or tick

    def take(self, peer: bytes, message: wire.Message, now: float) -> bool:
        """Take what a member says of itself; return whether ``message`` is such a notice."""
        if isinstance(message, wire.WorkerReport | wire.ServerReport):
            if self._heartbeats.is_from_member(peer, message):
                self.reports.take(message, now)
        elif isinstance(message, wire.TraceChunk):
            self._note_trace(peer, message)
        elif isinstance(message, wire.Stacks):
            self.inquiries.take(peer, message, now)
        else:
            return False
        return True

    def begin(self, now: float) -> None:
        """Note the time of the scheduler's first message or tick. Later calls change nothing."""
        if self._started is None:
            self._started = now

    def tick(self, now: float) -> None:
        self.inquiries.tick(now)
        if self._failure.text is None:
            self._stragglers.tick(now)

    def due(self) -> float | None:
        times = [due for due in (self.inquiries.due(), self._stragglers.due()) if due is not None]
        return min(times, default=None)

    def unaware(self, since: float, now: float) -> bool:
        """Whether an observer that looks regularly has not looked since a moment, and may do so yet."""
        return now - since < LOOK_S and any(since - LOOK_S <= seat.heard < since for seat in self._seats.values())

    def alerts(self) -> Outbox:
        """Return what has observers look at once, if a member has died or the job has failed.

        That is an answer to nothing, which ends their pause. It is sent before all else: members that hear of a failure
        end, and that takes all cores for seconds.
        """
        deaths = self._members.lost + (self._failure.text is not None)
        if deaths == self._deaths:
            return []
        self._deaths = deaths
        return [(peer, wire.Ack(NOTHING)) for peer in self.links]

    def take_news(self) -> list[str]:
        news = list(self._news)
        self._news.clear()
        return news

    # ---- observers

    def _answer(self, peer: bytes, message: wire.Request, now: float) -> wire.Reply | None:
        self._seat(message.node.incarnation, now)
        if isinstance(message, wire.Locate):
            self.inquiries.locate(peer, message, now)
            return None
        if isinstance(message, wire.FetchTrace):
            return self._fetch_trace(message, now)
        assert isinstance(message, wire.Observe)  # noqa: S101 (for the type checker: the links let nothing else pass)
        return self._observed(message, now)

    def _leave(self, nonce: int) -> None:
        super()._leave(nonce)
        if self.traces is not None:
            self.traces.release(nonce)

    def _observed(self, message: wire.Observe, now: float) -> wire.Observed:
        wanted = self._members.wanted
        everyone = self._members.everyone
        reports = [self.reports.of(member.node) for member in everyone]
        waits = self._waits()
        first, events = self.events.after(message.after)
        return wire.Observed(
            message.seq,
            now,
            now if self._started is None else self._started,
            [wanted[role] for role in ("worker", "server", "standby", "aggregator")],
            [_record(member, now) for member in everyone],
            self._failure.text,
            waits.text[: wire.MAX_REASON],
            first,
            events,
            [place for place, made in enumerate(reports) for _ in made],
            sorted(waits.missing),
            [wire.encode(report)[0] for made in reports for report in made],
        )

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
        if message.traced[1] and message.traced != self._heartbeats.traced:
            if message.traced[0] != self._heartbeats.traced[0]:
                self.traces.begin()
            self._heartbeats.trace(message.traced)
        return self.traces.fetch(message, now)


def _record(member: JobMember, now: float) -> list[object]:
    rank = member.hint if member.rank < 0 else member.rank
    silent_s = max(0.0, now - member.heard) if member.heard else 0.0
    state = member.state.name.lower()
    return [
        *(member.role, max(-1, rank), member.incarnation, state, silent_s),
        *(member.address, member.host, member.pid),
    ]
