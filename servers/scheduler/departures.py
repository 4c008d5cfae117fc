"""Workers that are gone, and which of these departures have been announced. Pure: the time is passed in.

A departure in order is announced only some seconds after it. A process that leaves because it is about to fail ends
within that time, and its exit code says more than that it has left. A loss is announced at once: others wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from kvstore import wire
from kvstore.job.contract import first_left
from servers.scheduler.members import JobMember


class Departures:
    """The workers of one job that are gone.

    Attributes:
        left: those that have left in order.
        known: those of them whose departure has been announced.
        lost: those that have died, and without which the job goes on, by rank, with the incarnation that died last.
        came: those of them that were started again, and those that were added, likewise, with their incarnations. Until
            they are let in, they are among those that are lost, too.
        keys: the public keys of these, by rank; empty where links prove none.
        aggregators: those that are lost, by rank.
    """

    def __init__(self, farewell_s: float, vacant: Iterable[int] = ()) -> None:
        self.left: set[int] = set()
        self.known: set[int] = set()
        self.lost: dict[int, int] = {}
        self.came: dict[int, int] = {}
        self.keys: dict[int, str] = {}
        self.aggregators: set[int] = set()
        self._vacant = set(vacant)  # the ranks of workers that may be added
        self._farewell_s = farewell_s
        self._recent: deque[tuple[float, int]] = deque()  # (when, rank) of those not yet known

    def add(self, rank: int, now: float) -> None:
        """Add worker ``rank``. ``now`` must not decrease from call to call."""
        self.left.add(rank)
        self._recent.append((now, rank))

    @property
    def first(self) -> int:
        """The worker that does what one does for all; see ``first_left``."""
        return first_left(self.lost.keys() | self._vacant if self._vacant else self.lost)

    def come(self, rank: int, incarnation: int, key: str = "") -> None:
        """Worker ``rank``, which is lost, was started again; or it was added, and is lost until somebody lets it in."""
        self._vacant.discard(rank)
        self.lost.setdefault(rank, incarnation - 1)
        self.came[rank], self.keys[rank] = incarnation, key

    def admit(self, rank: int) -> None:
        """Worker ``rank``, which was started again, is in."""
        self.lost.pop(rank, None)

    def lose(self, rank: int, incarnation: int = 1) -> None:
        """Let worker ``rank`` be lost, even if it has left just before: then it has failed."""
        self.left.discard(rank)
        self.known.discard(rank)
        self._recent = deque(entry for entry in self._recent if entry[1] != rank)
        self.lost[rank] = incarnation
        if self.came.get(rank, 0) <= incarnation:
            self.came.pop(rank, None)

    def due(self, now: float, *, all_gone: bool) -> list[int]:
        """Return the departures to announce now; all of them if no worker is left to wait."""
        ranks: list[int] = []
        while self._recent and (all_gone or now - self._recent[0][0] >= self._farewell_s):
            ranks.append(self._recent.popleft()[1])
        self.known.update(ranks)
        return ranks


class Rosters:
    """Announces departures to servers and aggregators; ``epoch`` counts the announcements."""

    def __init__(self, tell: Callable[[bytes, wire.Message], None]) -> None:
        self.over = False
        self._tell = tell
        self.epoch = 0
        self._news: wire.Roster | wire.Stop = wire.Roster(0, [])
        self.of_losses = False  # whether a worker or an aggregator has ever been lost

    def change(self, departures: Departures, *, over: bool) -> None:
        """Announce from now on which workers are gone; with ``over``, they are all of them."""
        self.over = over
        self.epoch += 1
        self.of_losses = self.of_losses or bool(departures.lost or departures.aggregators)
        gone = departures.known, departures.lost, departures.came, departures.keys, departures.aggregators
        roster = wire.Roster.of(self.epoch, *gone)
        self._news = wire.Stop() if over else roster

    def inform(self, member: JobMember) -> None:
        """Send a member the latest announcement: once over each link, but ``Stop`` at each heartbeat.

        Workers are told of losses only, not of others that leave.
        """
        if member.role == "worker" and not (isinstance(self._news, wire.Roster) and self.of_losses):
            return
        # ``Stop`` is not acknowledged, and after it the scheduler may end: a server that has missed it would wait for a
        # scheduler that is gone. Sent at each heartbeat, it is lost only if all of them are.
        if member.peer is not None and (member.epoch < self.epoch or self.over):
            member.epoch = self.epoch
            self._tell(member.peer, self._news)
