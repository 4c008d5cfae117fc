"""What becomes of a server's rank when one of its two processes ends, and who is told. Pure: the time is passed in.

``Views`` decides. Whoever holds a seat of the rank is told the view, and workers and aggregators where its server is.
Each is told again over each new link of its heartbeat.
"""

from __future__ import annotations

from collections.abc import Callable

from kvstore import wire
from servers.scheduler.member import JobMember, MemberState
from servers.scheduler.members import SEATS, Members
from servers.scheduler.views import Views
from servers.scheduler.welcomes import Welcomes


class Failover:
    """The servers of a job with replicas. In a job without, it has nothing to say.

    Args:
        members: of the job.
        tell: sends a message over a link.
    """

    def __init__(self, members: Members, tell: Callable[[bytes, wire.Message], None]) -> None:
        self._members = members
        self._tell = tell
        self._views = Views()
        self._welcomes: Welcomes | None = None

    def begin(self, welcomes: Welcomes) -> None:
        """All have joined; ``welcomes`` are to say where servers are."""
        self._welcomes = welcomes
        standbys = self._members.of("standby")
        if standbys:
            self._views.begin([server.node for server in self._members.of("server")], [one.node for one in standbys])

    def take_news(self) -> list[str]:
        """Return the lines for the user that have come up since the last call."""
        news, self._views.news = self._views.news, []
        return news

    def lose(self, member: JobMember, how: str, now: float) -> str:
        """Go on without ``member``, which has ended. Return why that is impossible; empty if it is possible.

        Args:
            how: it has ended: "was killed by SIGKILL".
        """
        takeovers = self._views.takeovers
        why = self._views.lose(member.node, how, now)
        if why:
            return why
        self._show_rank(member.rank)
        if self._views.takeovers > takeovers:
            self._move(member.rank)
        return ""

    def join(self, member: JobMember, now: float) -> None:
        """Let a process that was started again be the standby of its rank."""
        self._views.join(member.node, now)
        self._show_rank(member.rank)

    def give_up(self, node: wire.Node, how: str) -> None:
        """Note that the process of ``node``, which has ended, is not started again; see ``lose``."""
        self._views.give_up(node, how)

    def unanswering(self, standing: wire.Standing) -> JobMember | None:
        """Return the standby that its primary cannot reach, though it is alive as far as the scheduler knows."""
        standby = self._views.unanswering(standing)
        return None if standby is None else self._members.identify(standby)

    def stand(self, standing: wire.Standing, now: float) -> None:
        """Take in what a member says of itself."""
        self._views.stand(standing, now)
        self._show_rank(standing.node.rank)

    def show(self, member: JobMember) -> None:
        """Tell a member who serves, as far as it has not been told over its link: of its own rank, or of all ranks."""
        if member.peer is None or member.state is not MemberState.READY:
            return
        if member.role not in SEATS:
            if member.viewed < self._views.takeovers:
                member.viewed = self._views.takeovers
                for moved in self._moved():
                    self._tell(member.peer, moved)
            return
        view = self.view(member.rank)
        if view is not None and member.viewed < view.epoch:
            member.viewed = view.epoch
            self._tell(member.peer, view)

    def view(self, rank: int) -> wire.View | None:
        """Return a rank's view as its members are told it; None if there are no views."""
        view = self._views.of(rank)
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

    def _show_rank(self, rank: int) -> None:
        for role in SEATS:
            member = self._members.find(role, rank)
            if member is not None:
                self.show(member)

    def _move(self, rank: int) -> None:
        """Tell workers and aggregators who serves ``rank`` now."""
        view = self._views.of(rank)
        primary = None if view is None else self._members.identify(view.primary)
        if primary is not None and self._welcomes is not None:
            self._welcomes.servers[rank] = primary.address
        for member in (*self._members.of("worker"), *self._members.of("aggregator")):
            self.show(member)

    def _moved(self) -> list[wire.Moved]:
        servers = [] if self._welcomes is None else self._welcomes.servers
        return [wire.Moved(rank, epoch, servers[rank]) for rank, epoch in self._views.moved.items()]
