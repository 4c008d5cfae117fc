"""The observers of a job, in the scheduler: who may look on, and what they are told. Pure: the time is passed in.

Observers are no members. They ask, and change nothing: nobody waits for them, and nothing is lost with them. So they
are in no log. A scheduler that has been started again does not know them, and answers them all the same.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore import wire
from kvstore.errors import KVStoreError, UsageError
from kvstore.transport.base import Admission
from servers.requests.guest_links import GuestLinks
from servers.requests.reasons import Reason
from servers.requests.replies import Outbox, refuse
from servers.scheduler.events import Events
from servers.scheduler.member import JobMember
from servers.scheduler.members import Members

OBSERVER = "observer"  # the role of those who look on
MOST_OBSERVERS = 8
LOOK_S = 2.0  # who looks on regularly does so within this time
NOTHING = 0  # the number of no request
SILENT_S = 30.0  # observers ask more often; who does not is not counted any more


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
