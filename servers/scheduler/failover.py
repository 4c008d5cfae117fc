"""What becomes of a server's rank when one of its two processes ends, and its announcement. Pure; takes the time.

    (primary, standby, synced)      the standby has all that the primary has acknowledged
        │ primary lost                      │ standby lost
        ▼                                   ▼
    (the standby, none)             (primary, none)
        │ a newcomer
        ▼
    (primary, newcomer, not synced) ── the primary says so ──► (primary, standby, synced)

A process that is to retire goes the same ways: a standby at once, a primary as soon as its standby is in step.
Each change is a new epoch. A primary that is lost when there is no synced standby ends the job. A standby counts as
lost, too, if its primary says that it does not answer. Nobody but ``Views`` changes a view, and a process that is not
in the latest one must end.

The view is announced to both processes of the rank, and the place of its server to workers and aggregators. Each
announcement is repeated over each new link of a member's heartbeat.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvstore import wire
from servers.scheduler.members import SEATS, JobMember, MemberEvent, Members, MemberState, Welcomes


class ServerView(NamedTuple):
    """The processes that serve one rank. ``epoch`` grows with every change; ``synced``: the standby can take over."""

    epoch: int
    primary: wire.Node
    standby: wire.Node | None
    synced: bool


class _Takeover(NamedTuple):
    """A change of the primary of which the user has not been told yet."""

    lost: wire.Node
    how: str
    since: float


class Views:
    """The views of all ranks. ``moved`` has, by rank, the latest epoch in which another primary has taken over."""

    def __init__(self) -> None:
        self.moved: dict[int, int] = {}
        self.takeovers = 0
        self.news: list[str] = []
        self._views: list[ServerView] = []
        self._given_up: set[tuple[str, int]] = set()  # seats whose processes are not started again
        self._unsaid: dict[int, _Takeover] = {}
        self._joined: dict[int, float] = {}  # by rank: when the standby that is not synced has joined
        self._retiring: dict[int, wire.Node] = {}  # by rank: the process that is to end as soon as it can

    def begin(self, servers: Sequence[wire.Node], standbys: Sequence[wire.Node]) -> None:
        """All have joined, and nobody has any state: each server has its standby, in step."""
        self._views = [
            ServerView(1, primary, standby, synced=True) for primary, standby in zip(servers, standbys, strict=True)
        ]

    def of(self, rank: int) -> ServerView | None:
        """Return the view of a rank; None before all have joined, or in a job without replicas."""
        return self._views[rank] if 0 <= rank < len(self._views) else None

    def lose(self, node: wire.Node, how: str, now: float) -> str:
        """Go on without ``node``, which ``how`` ("was killed by SIGKILL"). Return why that is impossible, or ""."""
        view = self._views[node.rank]
        server = f"server {node.rank}"
        if node == view.standby:
            self._joined.pop(node.rank, None)
            self._views[node.rank] = ServerView(view.epoch + 1, view.primary, None, synced=False)
            self.news.append(f"the standby of {server} {how}{self._without(node)}")
        elif node == view.primary:
            if view.standby is None:
                return f"{server} {how}, and had no standby at that time"
            if not view.synced:
                return f"{server} {how} before its new standby was in step"
            self._views[node.rank] = ServerView(view.epoch + 1, view.standby, None, synced=False)
            self.moved[node.rank] = view.epoch + 1
            self.takeovers += 1
            self._unsaid[node.rank] = _Takeover(node, how, now)
        return ""

    def retire(self, node: wire.Node) -> None:
        """Let ``node`` go as soon as the other process of its rank can serve alone; see ``retires``."""
        self._retiring[node.rank] = node

    def retires(self, rank: int) -> wire.Node | None:
        """Return the process of a rank that was to go, and can now; the next call returns None."""
        node, view = self._retiring.get(rank), self.of(rank)
        if node is None or view is None:
            return None
        if node == view.primary and not view.synced:
            return None
        del self._retiring[rank]
        return node if node in (view.primary, view.standby) else None  # it may have been lost meanwhile

    def give_up(self, node: wire.Node, how: str) -> None:
        """The process of ``node`` will not be started again when it is lost, or has been lost and was not."""
        self._given_up.add((node.role, node.rank))
        view = self._views[node.rank]
        if all(seat is None or seat.role != node.role for seat in (view.primary, view.standby)):
            self.news.append(f"the standby of server {node.rank} {how}{self._without(node)}")

    def join(self, node: wire.Node, now: float) -> None:
        """Let a newcomer be the standby of its rank, which it is until its primary has brought it into step."""
        view = self._views[node.rank]
        self._views[node.rank] = ServerView(view.epoch + 1, view.primary, node, synced=False)
        self._joined[node.rank] = now

    def unanswering(self, standing: wire.Standing) -> wire.Node | None:
        """Return the standby that is in step by its view, and with which its primary says it has lost touch."""
        view = self.of(standing.node.rank)
        if view is None or (standing.node, standing.epoch) != (view.primary, view.epoch):
            return None
        return view.standby if view.synced and not standing.synced else None

    def stand(self, standing: wire.Standing, now: float) -> None:
        """Take what a primary says of itself. An older view, or another member, says nothing."""
        node = standing.node
        view = self.of(node.rank)
        if view is None or (node, standing.epoch) != (view.primary, view.epoch):
            return
        takeover = self._unsaid.pop(node.rank, None)
        if takeover is not None:
            alone = (takeover.lost.role, node.rank) in self._given_up
            self.news.append(
                f"server {node.rank} {takeover.how}; its standby took over at round {standing.rounds} in "
                f"{_took(now - takeover.since)}; {'it has no standby now' if alone else 'a new standby is being made'}"
            )
        if standing.synced and not view.synced and view.standby is not None:
            self._views[node.rank] = view._replace(epoch=view.epoch + 1, synced=True)
            taken = _took(now - self._joined.pop(node.rank, now))
            how = f" ({_size(standing.nbytes)} in {taken})" if standing.nbytes else f", after {taken}"
            self.news.append(f"the standby of server {node.rank} is in step again{how}")

    def _without(self, node: wire.Node) -> str:
        if (node.role, node.rank) in self._given_up:
            return f", and is not started again: server {node.rank} goes on without one"
        return "; a new one is being made"


def _took(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 0.1 else f"{1000 * seconds:.0f} ms"


def _size(nbytes: int) -> str:
    if nbytes < 1000:
        return f"{nbytes} bytes"
    return f"{nbytes / 1e6:.3g} MB" if nbytes >= 1e5 else f"{nbytes / 1e3:.3g} kB"


class Failover:
    """The servers of a job with replicas. In a job without, it has nothing to say."""

    def __init__(self, members: Members, tell: Callable[[bytes, wire.Message], None]) -> None:
        self._members = members
        self._tell = tell
        self.views = Views()
        self._welcomes: Welcomes | None = None

    def begin(self, welcomes: Welcomes) -> None:
        """All have joined; ``welcomes`` are to say where servers are."""
        self._welcomes = welcomes
        standbys = self._members.of("standby")
        if standbys:
            self.views.begin([server.node for server in self._members.of("server")], [one.node for one in standbys])

    def take_news(self) -> list[str]:
        news, self.views.news = self.views.news, []
        return news

    def retire(self, member: JobMember, now: float) -> None:
        """Let a process of a rank end in order, as soon as the other one can serve alone."""
        self.views.retire(member.node)
        self._relieve(member.rank, now)

    def lose(self, member: JobMember, how: str, now: float) -> str:
        """Go on without ``member``, which ``how`` ("was killed by SIGKILL"). Return why that is impossible, or ""."""
        takeovers = self.views.takeovers
        why = self.views.lose(member.node, how, now)
        if why:
            return why
        self._show_rank(member.rank)
        if self.views.takeovers > takeovers:
            self._move(member.rank)
        return ""

    def join(self, member: JobMember, now: float) -> None:
        """Let a process that was started again be the standby of its rank."""
        self.views.join(member.node, now)
        self._show_rank(member.rank)

    def unanswering(self, standing: wire.Standing) -> JobMember | None:
        standby = self.views.unanswering(standing)
        return None if standby is None else self._members.identify(standby)

    def stand(self, standing: wire.Standing, now: float) -> None:
        self.views.stand(standing, now)
        self._show_rank(standing.node.rank)
        self._relieve(standing.node.rank, now)

    def show(self, member: JobMember) -> None:
        """Announce to a member which processes serve, unless that went over its link: its own rank, or all ranks."""
        if member.peer is not None and member.retired and not member.viewed:
            member.viewed = 1
            self._tell(member.peer, wire.Stop())
        if member.peer is None or member.state is not MemberState.READY:
            return
        if member.role not in SEATS:
            if member.viewed < self.views.takeovers:
                member.viewed = self.views.takeovers
                for rank, epoch in self.views.moved.items():
                    address = "" if self._welcomes is None else self._welcomes.servers[rank]
                    self._tell(member.peer, wire.Moved(rank, epoch, address))
            return
        view = self.view(member.rank)
        if view is not None and member.viewed < view.epoch:
            member.viewed = view.epoch
            self._tell(member.peer, view)

    def view(self, rank: int) -> wire.View | None:
        """Return a rank's view as its members are told it; None if there are no views."""
        view = self.views.of(rank)
        if view is None:
            return None
        primary = self._members.identify(view.primary)
        standby = None if view.standby is None else self._members.identify(view.standby)
        return wire.View(
            view.primary,
            view.epoch,
            primary_key="" if primary is None else primary.key,
            standby=None if standby is None else [standby.role, standby.incarnation],
            standby_address="" if standby is None else standby.address,
            standby_key="" if standby is None else standby.key,
            synced=view.synced,
        )

    def _relieve(self, rank: int, now: float) -> None:
        """Let the process of a rank go that was to, if it can.

        The view changes first: that process may be stopped, and nobody has to wait for it. Whatever it still answers
        had to be stored by the other one before that took over.
        """
        node = self.views.retires(rank)
        member = None if node is None else self._members.identify(node)
        if member is not None and self._members.happens(member, MemberEvent.LEAVES):
            member.retired, member.viewed = True, 0
            self.lose(member, "is moved", now)

    def _show_rank(self, rank: int) -> None:
        for role in SEATS:
            member = self._members.find(role, rank)
            if member is not None:
                self.show(member)

    def _move(self, rank: int) -> None:
        view = self.views.of(rank)
        primary = None if view is None else self._members.identify(view.primary)
        if primary is not None and self._welcomes is not None:
            self._welcomes.servers[rank] = primary.address
        for member in (*self._members.of("worker"), *self._members.of("aggregator")):
            self.show(member)
