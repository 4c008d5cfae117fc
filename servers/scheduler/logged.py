"""The scheduler with a log of its inputs, from which its successor makes the same scheduler again. Pure.

Links end with the process that has them. So in a replay each has a name that no link has now; members make new links,
say whose they are, and ask again what has no answer. Beats are not logged: at the first beat over a new link, each
member is told again what it may have missed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

from kvstore import wire
from kvstore.transport.base import Admission
from servers.requests.replies import Outbox
from servers.scheduler.core import Scheduler
from servers.scheduler.records import Came, Record, Succession, Ticked

REQUESTS = (
    wire.Leave,
    wire.OpenStore,
    wire.CloseStore,
    wire.Declare,
    wire.Ready,
    wire.Barrier,
    wire.Pause,
)  # of members, that change anything
_FORMER = b"former "  # begins the names of links that were there before a replay


class FormerLinks:
    """The links of this process, and of the processes before it, which have ended.

    Args:
        admission: of the former.
    """

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._key = ""

    def recall(self, start: int, peer: bytes, key: str) -> bytes:
        """Return a name for a former link; the latest to be recalled is known to have proved ``key``."""
        self._key = key
        return b"%s%d %s" % (_FORMER, start, peer)

    def admit(self, peer: bytes) -> None:
        """See ``Admission``."""
        if not is_former(peer):
            self._admission.admit(peer)

    def refuse(self, peer: bytes) -> None:
        """See ``Admission``."""
        if not is_former(peer):
            self._admission.refuse(peer)

    def identity(self, peer: bytes) -> str:
        """See ``Admission``."""
        return self._key if is_former(peer) else self._admission.identity(peer)

    def gone(self, peer: bytes) -> bool:
        """See ``Admission``."""
        return is_former(peer) or self._admission.gone(peer)


def is_former(peer: bytes) -> bool:
    """Whether a link has ended with a process before this one."""
    return peer.startswith(_FORMER)


class LoggedScheduler:
    """Logs what changes a scheduler, before anybody is told of the change.

    Args:
        scheduler: as it begins, with ``links`` as its admission.
        links: of this process, and of those before it.
        log: is called with each record.
    """

    def __init__(self, scheduler: Scheduler, links: FormerLinks, log: Callable[[Record], None]) -> None:
        self._scheduler = scheduler
        self._links = links
        self._log = log
        self._synced: dict[tuple[str, int], tuple[int, bool]] = {}  # by seat: the latest epoch and state of its standby

    def replay(self, records: Iterable[Record], now: float) -> None:
        """Take the inputs of the processes before this one, and go on from there."""
        scheduler, starts = self._scheduler, itertools.count()
        start = next(starts)
        for record in records:
            if isinstance(record, Succession):
                start = next(starts)
            elif isinstance(record, Ticked):
                scheduler.tick_again(record.now, record.silent)
            else:
                peer = self._links.recall(start, record.peer, record.key)
                scheduler.handle(peer, record.message, record.now)
        scheduler.resume(now)

    def handle(self, peer: bytes, message: wire.Message, now: float) -> Outbox:
        """See ``Scheduler.handle``."""
        may_matter = not self._scheduler.changes_nothing(peer, message) and self._may_matter(message)
        outbox = self._scheduler.handle(peer, message, now)
        if may_matter and not (isinstance(message, wire.Join) and not self._joined(message)):
            self._log(Came(now, peer, self._links.identity(peer), message))
        return _over_links(outbox)

    def tick(self, now: float) -> Outbox:
        """See ``Scheduler.tick``."""
        before = self._scheduler.epoch
        outbox = self._scheduler.tick(now)
        changed = any(not isinstance(message, wire.Located) for _, message in outbox)
        if changed or self._scheduler.silent or self._scheduler.epoch != before:
            self._log(Ticked(now, self._scheduler.silent))
        return _over_links(outbox)

    def _may_matter(self, message: wire.Message) -> bool:
        """Whether a message may change the scheduler. Strangers must not fill the log."""
        if isinstance(message, wire.Join):
            return not self._joined(message)
        if isinstance(message, REQUESTS):
            known = self._scheduler.members.identify(message.node) is not None
            return known or (isinstance(message, wire.Leave) and message.node.rank < 0 and self._joined(message))
        if isinstance(message, wire.Standing):
            seat, state = message.node[:2], (message.epoch, message.synced)
            before = self._synced.get(seat)
            self._synced[seat] = state
            return before != state
        return isinstance(message, wire.Lost)

    def _joined(self, message: wire.Join | wire.Leave) -> bool:
        """Whether the sender of a message without a rank has joined."""
        return self._scheduler.members.by_nonce(message.node.incarnation) is not None


def _over_links(outbox: Outbox) -> Outbox:
    """Return what goes over links that are there: members have asked again over these."""
    return [entry for entry in outbox if not is_former(entry[0])]
