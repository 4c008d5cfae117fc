"""A standby: takes the records of its primary in order, acknowledges them, and applies them. Pure.

A record is stored when it is here: it is applied even if the primary is lost. A standby takes records over links that
are its primary's, and of the view that has put the two together.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from kvstore import wire
from kvstore.errors import WireError
from kvstore.rare_log import Drops
from kvstore.transport.transport import Admission
from servers.requests.replies import Outbox

log = logging.getLogger(__name__)

SEATS = ("server", "standby")  # the roles of the two processes of one rank
KEPT = 8  # links of servers that are remembered, and records that are kept before the first view


class Standby:
    """The records of one primary: stored as they come, applied when time allows, or when this process takes over."""

    def __init__(self, apply: Callable[[wire.Message], None], admission: Admission) -> None:
        self._apply = apply
        self._admission = admission
        self._view: wire.View | None = None
        self._links: dict[bytes, wire.Node] = {}
        self._early: deque[tuple[bytes, wire.Record]] = deque(maxlen=KEPT)
        self._records: deque[wire.Record] = deque()  # as they came
        self._backlog = Backlog()
        self._stored = 0
        self._drops = Drops(log)

    @property
    def behind(self) -> int:
        return len(self._records) + len(self._backlog)

    @property
    def ready(self) -> bool:
        return bool(self._records) or self._backlog.ready

    def here(self, peer: bytes, node: wire.Node) -> None:
        if peer not in self._links and len(self._links) >= KEPT:
            del self._links[next(iter(self._links))]
        self._links[peer] = node
        if self._view is not None:
            self._admit(peer, self._view)

    def look(self, view: wire.View) -> Outbox:
        """Take the view that makes this process the standby of ``view.primary``; return messages."""
        if self._view is not None and self._view.primary == view.primary:
            return []  # records keep the epoch of the first view
        self._view = view
        for peer in self._links:
            self._admit(peer, view)
        outbox: Outbox = []
        while self._early:
            peer, record = self._early.popleft()
            try:
                outbox += self.take(peer, record)
            except WireError as exc:
                self._drops.note("a record that came before the view", exc)
                self._admission.refuse(peer)
        return outbox

    def take(self, peer: bytes, record: wire.Record) -> Outbox:
        """Store a record; return its acknowledgement."""
        view = self._view
        if view is None:  # the primary may hear of the view before this process: the record is kept, not refused
            self._early.append((peer, record))
            return []
        if record.epoch != view.epoch or not self._is_from_primary(peer, view):
            raise WireError(
                f"a record of view {record.epoch} from {self._links.get(peer, 'a stranger')}; this standby takes those "
                f"of view {view.epoch} from {view.primary}, over a link with its key"
            )
        if record.number > self._stored + 1:
            raise WireError(f"expected record {self._stored + 1}, got {record.number}")
        if record.number == self._stored + 1:
            self._records.append(record)
            self._stored = record.number
        return [(peer, wire.Stored(view.epoch, self._stored))]

    def go_on(self) -> None:
        """Apply the next record, if it is due. An error must end this process, which would differ from its primary."""
        while self._records and not self._backlog.ready:
            self._backlog.add(wire.decode(self._records.popleft().buffers))
        message = self._backlog.take()
        if message is not None:
            self._apply(message)

    def catch_up(self) -> None:
        while self.behind:
            if not self.ready:
                self._backlog.hurry()
            self.go_on()

    def _is_from_primary(self, peer: bytes, view: wire.View) -> bool:
        return self._links.get(peer) == view.primary and self._admission.identity(peer) == view.primary_key

    def _admit(self, peer: bytes, view: wire.View) -> None:
        if self._is_from_primary(peer, view):
            self._admission.admit(peer)
        else:
            self._drops.note(f"a link of {self._links[peer]}", f"the primary of this standby is {view.primary}")
            self._admission.refuse(peer)


MOST = 16  # rounds of the same arrays that are kept: a primary hands its arrays over sooner
_Arrays: TypeAlias = "tuple[int, tuple[int, ...], tuple[int, ...]]"


class Backlog:
    """The records that a standby has not applied, in the order in which it does.

    A standby may keep a round until the primary hands over its result. Then the standby drops the round, and keeps the
    result, until the next hand-over replaces that, too. Nothing is lost with that: a record is stored when it is here,
    and a standby that takes over applies all of them first. Rounds of different arrays, and of tables, can be applied
    in any order. Any other record comes after all that came before it.
    """

    def __init__(self) -> None:
        self._due: deque[wire.Message] = deque()
        self._kept: dict[_Arrays, list[wire.ClosedRounds | wire.Updated]] = {}
        self._ids: set[tuple[int, int]] = set()  # the arrays of those that are kept, with their stores

    def __len__(self) -> int:
        return len(self._due) + sum(map(len, self._kept.values()))

    @property
    def ready(self) -> bool:
        return bool(self._due)

    def add(self, message: wire.Message) -> None:
        if isinstance(message, wire.ClosedRowRounds):
            self._due.append(message)
        elif isinstance(message, wire.ClosedRounds) and message.kept:
            self._keep(message)
        elif isinstance(message, wire.Updated) and self._replaces(message):
            self._kept[_arrays_of(message)] = [message]
        else:
            self.hurry()
            self._due.append(message)

    def take(self) -> wire.Message | None:
        return self._due.popleft() if self._due else None

    def hurry(self) -> None:
        """Let all rounds that were kept be due."""
        for messages in self._kept.values():
            self._due.extend(messages)
        self._kept.clear()
        self._ids.clear()

    def _keep(self, message: wire.ClosedRounds) -> None:
        arrays = _arrays_of(message)
        if arrays not in self._kept:
            ids = {(message.store, number) for number in message.ids}
            if not self._ids.isdisjoint(ids):  # they are pushed in other lists now
                self.hurry()
            self._ids |= ids
            self._kept[arrays] = []
        self._kept[arrays].append(message)
        if len(self._kept[arrays]) > MOST:
            self.hurry()

    def _replaces(self, message: wire.Updated) -> bool:
        """Return whether ``message`` is the result of all kept rounds of its arrays."""
        kept = self._kept.get(_arrays_of(message))
        return kept is not None and kept[-1].versions == message.versions


def _arrays_of(message: wire.ClosedRounds | wire.Updated) -> _Arrays:
    return message.store, tuple(message.ids), tuple(message.sizes)
