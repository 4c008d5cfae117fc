"""How the job is, as the scheduler knows it: events, reports, places in the code, a straggler, and who asks. Pure.

Nothing here changes the job, and nothing is logged: a scheduler that has been started again begins anew with it.
"""

from __future__ import annotations

from collections.abc import Callable

from kvstore import wire
from kvstore.errors import UsageError
from kvstore.transport.base import Admission
from servers.requests.reasons import Reason
from servers.requests.replies import Outbox
from servers.requests.reply_links import ReplyLinks
from servers.scheduler.beats import Beats
from servers.scheduler.events import Events
from servers.scheduler.failure import JobFailure
from servers.scheduler.inquiries import Inquiries
from servers.scheduler.members import Members
from servers.scheduler.observers import JobState, Observers
from servers.scheduler.reports import Reports
from servers.scheduler.straggling import StragglerWatch
from servers.scheduler.traces import Traces


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
