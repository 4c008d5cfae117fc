"""Who serves each server's rank, and who would take over, in a job with replicas. Pure: the time is passed in.

    (primary, standby, synced)      the standby has all that the primary has acknowledged
        │ primary lost                      │ standby lost
        ▼                                   ▼
    (the standby, none)             (primary, none)
        │ a newcomer
        ▼
    (primary, newcomer, not synced) ── the primary says so ──► (primary, standby, synced)

Each change is a new epoch. A primary that is lost when there is no synced standby ends the job. A standby counts as
lost, too, if its primary says that it does not answer. Nobody but this module changes a view, and whoever is not in the
latest one must end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvstore import wire


class ServerView(NamedTuple):
    """Who serves one rank.

    Attributes:
        epoch: grows with every change.
        primary: serves workers.
        standby: takes over when the primary is lost; None if there is none.
        synced: whether it can.
    """

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
    """The views of all ranks.

    Attributes:
        moved: by rank, the latest epoch in which another primary has taken over.
        takeovers: how many there have been.
        news: lines for the user.
    """

    def __init__(self) -> None:
        self.moved: dict[int, int] = {}
        self.takeovers = 0
        self.news: list[str] = []
        self._views: list[ServerView] = []
        self._given_up: set[tuple[str, int]] = set()  # seats whose processes are not started again
        self._unsaid: dict[int, _Takeover] = {}
        self._joined: dict[int, float] = {}  # by rank: when the standby that is not synced has joined

    def begin(self, servers: Sequence[wire.Node], standbys: Sequence[wire.Node]) -> None:
        """All have joined, and nobody has any state: each server has its standby, in step."""
        self._views = [
            ServerView(1, primary, standby, synced=True) for primary, standby in zip(servers, standbys, strict=True)
        ]

    def of(self, rank: int) -> ServerView | None:
        """Return the view of a rank; None before all have joined, or in a job without replicas."""
        return self._views[rank] if 0 <= rank < len(self._views) else None

    def lose(self, node: wire.Node, how: str, now: float) -> str:
        """Go on without ``node``. Return why that is impossible; empty if it is possible.

        Args:
            how: it was lost: "was killed by SIGKILL".
        """
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

    def give_up(self, node: wire.Node, how: str) -> None:
        """Note that the process of ``node`` is not started again when it is lost, or has been lost and is not."""
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
        """Take in what a primary says of itself. That of an older view, or of another member, says nothing."""
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
