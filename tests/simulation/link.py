"""Links in virtual time: messages are late, and links are cut and made anew, as the seed says.

A link keeps its messages in order, each once, as ``Transport`` promises. What is on its way when a link is cut is lost.
The end that has made it makes it anew and hears of that; at the other end it is a new peer. So messages come twice when
their sender sends them again, and messages of different links overtake each other. Of what a process had sent when it
was killed, some of what has left it may still arrive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from simulation.network import Network

from kvstore import wire
from kvstore.transport import Peer
from kvstore.transport.memory import ScatteredFrame, space, whole
from kvstore.transport.transport import Frames

if TYPE_CHECKING:
    from simulation.transport import SimulatedTransport


class SimulatedLink:
    """A link between the end that has made it and the listener, as often as it is made anew.

    Attributes:
        route: its name at the near end.
        peer: its name at the far end; None while it is down.
    """

    def __init__(self, network: Network, near: SimulatedTransport, endpoint: str) -> None:
        self.near = near
        self.route = network.new_peer()
        self.peer: Peer | None = None
        self.far: SimulatedTransport | None = None
        self._network = network
        self._endpoint = endpoint
        self._made = 0
        self._lanes = (_Lane(network, self), _Lane(network, self))
        self._waiting: list[Sequence[wire.Buffer | ScatteredFrame]] = []
        self.ended = False
        network.add(self)
        self._dial_soon(network.delay())

    @property
    def between(self) -> frozenset[str]:
        """The names of the processes at its ends, while it is there."""
        return frozenset() if self.far is None else frozenset((self.near.process.name, self.far.process.name))

    def from_near(self, frames: Sequence[wire.Buffer | ScatteredFrame]) -> None:
        """Send to the far end, now or when the link is there for the first time."""
        if self.far is not None and self.peer is not None:
            self._lanes[0].send(self.near, self.far, self.peer, frames)
        elif not self._made:
            self._waiting.append(frames)

    def from_far(self, frames: Sequence[wire.Buffer | ScatteredFrame]) -> None:
        if self.far is not None:
            self._lanes[1].send(self.far, self.near, self.route, frames)

    def leave(self) -> None:
        for lane in self._lanes:
            lane.leave()
        self._waiting = [_copied(frames) for frames in self._waiting]

    def cut(self) -> None:
        """Lose all that is on its way; the near end makes the link anew."""
        if self.far is None:
            return
        network, far = self._network, self.far
        network.cuts += 1
        network.note(self.near.process.name, far.process.name, None)
        if self.peer is not None:
            far.accepted.pop(self.peer, None)
        self.far = self.peer = None
        for lane in self._lanes:
            lane.clear()
        self._dial_soon(network.delay(network.weather.redial_s))

    def end(self) -> None:
        """Lose all that is on its way, for good."""
        self.ended = True
        self.cut()

    def die(self, dead: SimulatedTransport) -> None:
        """Lose what ``dead`` has not sent yet, and end the link when some of what it has sent has arrived."""
        lane = self._lanes[0 if dead is self.near else 1]
        lane.drop()
        self._network.world.after(self._network.dice.random() * lane.busy_s, self.cut)

    def _dial_soon(self, delay_s: float) -> None:
        self._network.world.after(delay_s, self._dial)

    def _dial(self) -> None:
        if self.near.closed or self.ended:
            return
        far = self._network.listeners.get(self._endpoint)
        if far is None or self._network.parted(self.near.process.name, far.process.name):
            self._dial_soon(self._network.delay(self._network.weather.redial_s))
            return
        self.far, self.peer = far, self._network.new_peer()
        far.accepted[self.peer] = self
        self._made += 1
        if self._made > 1:
            self._network.note(far.process.name, self.near.process.name, [])
            self.near.take(self.route, [])
        for frames in self._waiting:
            self.from_near(frames)
        self._waiting.clear()


class _Lane:
    """One direction of a link: first in, first out. A message is read when it leaves, some time after it was sent."""

    def __init__(self, network: Network, link: SimulatedLink) -> None:
        self._network = network
        self._link = link
        self._free_at = 0.0
        self._generation = 0
        self._unsent: list[list[wire.Buffer | ScatteredFrame]] = []

    def send(
        self,
        source: SimulatedTransport,
        target: SimulatedTransport,
        peer: Peer,
        frames: Sequence[wire.Buffer | ScatteredFrame],
    ) -> None:
        network, message = self._network, list(frames)
        if _is_report(frames):
            target.take(peer, _copied(message))
            return
        self._unsent.append(message)
        leaves = max(self._free_at, network.world.now + network.delay())
        arrives = self._free_at = leaves + network.delay()
        late_s = network.late_s.get((source.process.name, target.process.name), 0.0)
        generation = self._generation

        def leave() -> None:
            if generation == self._generation:
                self._unsent[:] = [other for other in self._unsent if other is not message]
                message[:] = _copied(message)

        def arrive() -> None:
            if generation != self._generation or target.closed or not message:
                return
            if network.dice.random() < network.weather.cut:
                self._link.cut()
                return
            copies = 2 if network.dice.random() < network.weather.repeat else 1
            for _ in range(copies):
                network.deliveries += 1
                network.note(source.process.name, target.process.name, _copied(message))
                if network.welcomed is None and isinstance(wire.decode(_copied(message)), wire.Welcome):
                    network.welcomed = network.deliveries
                target.take(peer, _copied(message))
                network.on_delivery()

        network.world.after(leaves - network.world.now, leave)
        network.world.after(arrives + late_s - network.world.now, arrive)

    def leave(self) -> None:
        for message in self._unsent:
            message[:] = _copied(message)
        self._unsent.clear()

    @property
    def busy_s(self) -> float:
        return max(0.0, self._free_at - self._network.world.now)

    def drop(self) -> None:
        for message in self._unsent:
            message.clear()
        self._unsent.clear()

    def clear(self) -> None:
        self._generation += 1
        self._free_at = 0.0
        self._unsent.clear()


def _is_report(frames: Sequence[wire.Buffer | ScatteredFrame]) -> bool:
    return len(frames) == 1 and isinstance(wire.decode([whole(frames[0])]), wire.WorkerReport | wire.ServerReport)


def _copied(frames: Sequence[wire.Buffer | ScatteredFrame]) -> Frames:
    """Return copies of frames, aligned as received ones are."""
    copies: Frames = []
    for frame in frames:
        data = memoryview(whole(frame)).cast("B")
        copy = space(len(data))
        copy[:] = data
        copies.append(copy)
    return copies
