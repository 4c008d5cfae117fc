"""A member's end of its links in virtual time."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from simulation.link import SimulatedLink
from simulation.network import Network, Process
from simulation.world import Task

from kvstore import wire
from kvstore.transport import Peer
from kvstore.transport.memory import Heap, ScatteredFrame
from kvstore.transport.transport import Frames


class SimulatedTransport(Heap):
    """One member's end of its links; see ``Transport``. ``accepted``: incoming links, by their names here."""

    def __init__(self, network: Network, process: Process) -> None:
        self.process = process
        self.accepted: dict[Peer, SimulatedLink] = {}
        self.closed = process.dead  # which is unwound, and must not speak any more
        self.refused = 0
        self._network = network
        self._made: dict[Peer, SimulatedLink] = {}
        self._inbox: deque[tuple[Peer, Frames]] = deque()
        self._rung = False
        self._sleeper: Task | None = None
        process.ends.append(self)

    def bind(self, endpoint: str) -> str:
        self._network.listeners[endpoint] = self
        return endpoint

    def connect(self, endpoint: str, *, bulk: bool = False) -> Peer:
        link = SimulatedLink(self._network, self, endpoint)
        self._made[link.route] = link
        return link.route

    def disconnect(self, peer: Peer) -> None:
        self._made.pop(peer).end()
        self._inbox = deque(entry for entry in self._inbox if entry[0] != peer)

    def send(self, peer: Peer, frames: Sequence[wire.Buffer | ScatteredFrame], priority: int | None = None) -> None:
        """Send ``frames``, in order: this network has no priorities."""
        if self.closed:
            return
        if peer in self._made:
            self._made[peer].from_near(frames)
        elif peer in self.accepted:
            self.accepted[peer].from_far(frames)

    def take(self, peer: Peer, frames: Frames) -> None:
        if not self.closed:
            self._inbox.append((peer, frames))
            self._wake()

    def recv(self, timeout: float) -> tuple[Peer, Frames] | None:
        world, deadline = self._network.world, self._network.world.now + timeout
        while not self._inbox:
            if self._rung or world.now >= deadline:
                self._rung = False
                return None
            self._sleeper = world.current
            assert self._sleeper is not None
            self._sleeper.wait(deadline - world.now)
            self._sleeper = None
        return self._inbox.popleft()

    def interrupt(self) -> None:
        self._rung = True
        self._wake()

    def gathers(self, peer: Peer) -> bool:
        """True: messages are read when they leave."""
        return True

    def shares(self, peer: Peer) -> bool:
        return self._network.shares

    def detach(self) -> None:
        for link in (*self._made.values(), *self.accepted.values()):
            link.leave()

    def admit(self, peer: Peer) -> None:
        """No effect: nobody is a stranger here."""

    def refuse(self, peer: Peer) -> None:
        """Count it: members send nothing that is refused, while they live."""
        link = self.accepted.get(peer)
        if link is not None and not link.near.process.dead:
            self.refused += 1

    def identity(self, peer: Peer) -> str:
        """Empty: there are no keys."""
        return ""

    def gone(self, peer: Peer) -> bool:
        return peer not in self.accepted

    def abandon(self) -> None:
        """Drop all links, as the system does when a process is killed."""
        self._end()
        for link in (*self._made.values(), *self.accepted.values()):
            link.die(self)

    def close(self, linger: float = 0.0) -> None:
        self.detach()
        self._end()

    def _end(self) -> None:
        self.closed = True
        for endpoint in [name for name, end in self._network.listeners.items() if end is self]:
            del self._network.listeners[endpoint]
        self._wake()

    def _wake(self) -> None:
        if self._sleeper is not None:
            self._sleeper.wake()
