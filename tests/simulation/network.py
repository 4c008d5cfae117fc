"""Links in virtual time: messages are late, and links are cut and made anew, as the seed says.

What members report of themselves arrives at once and is not counted, so that what a seed does to all else does not
depend on it.

A link keeps its messages in order, each once, as ``Transport`` promises. What is on its way when a link is cut is lost.
The end that has made it makes it anew and hears of that; at the other end it is a new peer. So messages come twice when
their sender sends them again, and messages of different links overtake each other. Of what a process had sent when it
was killed, some of what has left it may still arrive.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from simulation.world import Task, World

from kvstore.transport import Peer
from kvstore.transport.base import Frames
from kvstore.transport.memory import Heap, ScatteredFrame, space, whole
from kvstore.wire import Buffer, ServerReport, Welcome, WorkerReport, decode


@dataclass(frozen=True)
class Weather:
    """What links are like.

    Attributes:
        delay_s: of a message, on average.
        cut: the part of deliveries that cut their link instead.
        repeat: the part of messages that come twice.
        redial_s: until a lost link is there again, on average.
    """

    delay_s: float = 0.002
    cut: float = 0.0
    repeat: float = 0.0
    redial_s: float = 0.05


class Process:
    """What dies as one: the tasks and the ends of links of one member.

    Args:
        name: of the member.
        start: how often this member has been started, this time included.
    """

    def __init__(self, name: str, start: int = 1) -> None:
        self.name = name
        self.start = start
        self.dead = False
        self.tasks: list[Task] = []
        self.ends: list[SimulatedTransport] = []

    def kill(self) -> None:
        """End all of it, without a word to anybody."""
        self.dead = True
        for end in self.ends:
            end.abandon()
        for task in self.tasks:
            task.kill()

    def stop(self) -> None:
        """Let it do nothing until ``resume``. Its links stay."""
        for task in self.tasks:
            task.stop()

    def resume(self) -> None:
        """Let it go on."""
        for task in self.tasks:
            task.resume()


class Network:
    """All links of one job.

    Args:
        world: whose time it is.
        seed: decides what happens to which message.
        weather: how often what happens.

    Attributes:
        deliveries: how many messages have arrived.
        cuts: how many links have been cut.
        traffic: bytes that have arrived, by the names of the sender and the receiver.
        late_s: by the names of sender and receiver, how much later messages between them arrive.
        on_delivery: called after each message has been put into its inbox.
        welcomed: after how many deliveries the first member was welcomed; None if none has been.
    """

    def __init__(self, world: World, seed: int, weather: Weather) -> None:
        self.world = world
        self.dice = random.Random(seed)
        self.weather = weather
        self.deliveries = self.cuts = 0
        self.traffic: Counter[tuple[str, str]] = Counter()
        self.on_delivery: Callable[[], None] = lambda: None
        self.welcomed: int | None = None
        self.late_s: dict[tuple[str, str], float] = {}
        self.listeners: dict[str, SimulatedTransport] = {}
        self._links: list[_Link] = []
        self._parted: set[frozenset[str]] = set()
        self._numbers = itertools.count()
        self._events: list[tuple[float, str, str, list[bytes] | None]] = []

    def new_peer(self) -> Peer:
        """Return a name for one end of a link."""
        return b"%d" % next(self._numbers)

    def add(self, link: _Link) -> None:
        """Note a link that has been made."""
        self._links.append(link)

    def part(self, one: str, other: str, last_s: float) -> None:
        """Cut all links between two processes, and let them make none for so many seconds."""
        pair = frozenset((one, other))
        self._parted.add(pair)
        self.world.after(last_s, lambda: self._parted.discard(pair))
        for link in self._links:
            if link.between == pair:
                link.cut()

    def parted(self, one: str, other: str) -> bool:
        """Whether these processes cannot reach each other."""
        return frozenset((one, other)) in self._parted

    def delay(self, mean_s: float | None = None) -> float:
        """Return how long something takes."""
        return self.dice.expovariate(1 / (mean_s or self.weather.delay_s))

    def note(self, source: str, target: str, frames: Sequence[Buffer] | None) -> None:
        """Keep a line for the trace; None where a link has been cut."""
        copied = None if frames is None else [bytes(frame) for frame in frames]
        self._events.append((self.world.now, source, target, copied))
        self.traffic[source, target] += sum(map(len, copied or ()))

    def trace(self, most: int = 200) -> str:
        """Return what has happened on the links, the latest last."""
        lines = []
        for now, source, target, frames in self._events[-most:]:
            what = "is cut" if frames is None else "is made anew" if not frames else repr(decode(frames))[:150]
            lines.append(f"{now:.4f} {source} -> {target}: {what}")
        return "\n".join(lines)


class _Link:
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
        self._waiting: list[Sequence[Buffer | ScatteredFrame]] = []
        self.ended = False
        network.add(self)
        self._dial_soon(network.delay())

    @property
    def between(self) -> frozenset[str]:
        """The names of the processes at its ends, while it is there."""
        return frozenset() if self.far is None else frozenset((self.near.process.name, self.far.process.name))

    def from_near(self, frames: Sequence[Buffer | ScatteredFrame]) -> None:
        """Send to the far end, now or when the link is there for the first time."""
        if self.far is not None and self.peer is not None:
            self._lanes[0].send(self.near, self.far, self.peer, frames)
        elif not self._made:
            self._waiting.append(frames)

    def from_far(self, frames: Sequence[Buffer | ScatteredFrame]) -> None:
        """Send to the near end."""
        if self.far is not None:
            self._lanes[1].send(self.far, self.near, self.route, frames)

    def leave(self) -> None:
        """Copy what has not left yet."""
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

    def __init__(self, network: Network, link: _Link) -> None:
        self._network = network
        self._link = link
        self._free_at = 0.0
        self._generation = 0
        self._unsent: list[list[Buffer | ScatteredFrame]] = []

    def send(
        self,
        source: SimulatedTransport,
        target: SimulatedTransport,
        peer: Peer,
        frames: Sequence[Buffer | ScatteredFrame],
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
                if network.welcomed is None and isinstance(decode(_copied(message)), Welcome):
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
        """Until all has arrived."""
        return max(0.0, self._free_at - self._network.world.now)

    def drop(self) -> None:
        """Lose what has not left yet."""
        for message in self._unsent:
            message.clear()
        self._unsent.clear()

    def clear(self) -> None:
        self._generation += 1
        self._free_at = 0.0
        self._unsent.clear()


def _is_report(frames: Sequence[Buffer | ScatteredFrame]) -> bool:
    return len(frames) == 1 and isinstance(decode([whole(frames[0])]), WorkerReport | ServerReport)


def _copied(frames: Sequence[Buffer | ScatteredFrame]) -> Frames:
    """Return copies of frames, aligned as received ones are."""
    copies: Frames = []
    for frame in frames:
        data = memoryview(whole(frame)).cast("B")
        copy = space(len(data))
        copy[:] = data
        copies.append(copy)
    return copies


class SimulatedTransport(Heap):
    """One member's end of its links; see ``Transport``.

    Args:
        network: of the job.
        process: whose end it is.

    Attributes:
        accepted: the links that others have made, by their names here.
        closed: whether nothing arrives here any more.
        refused: how many messages the member has refused.
    """

    def __init__(self, network: Network, process: Process) -> None:
        self.process = process
        self.accepted: dict[Peer, _Link] = {}
        self.closed = process.dead  # which is unwound, and must not speak any more
        self.refused = 0
        self._network = network
        self._made: dict[Peer, _Link] = {}
        self._inbox: deque[tuple[Peer, Frames]] = deque()
        self._rung = False
        self._sleeper: Task | None = None
        process.ends.append(self)

    def bind(self, endpoint: str) -> str:
        """Listen at ``endpoint``."""
        self._network.listeners[endpoint] = self
        return endpoint

    def connect(self, endpoint: str, *, bulk: bool = False) -> Peer:
        """Make a link."""
        link = _Link(self._network, self, endpoint)
        self._made[link.route] = link
        return link.route

    def disconnect(self, peer: Peer) -> None:
        """Drop a link."""
        self._made.pop(peer).end()
        self._inbox = deque(entry for entry in self._inbox if entry[0] != peer)

    def send(self, peer: Peer, frames: Sequence[Buffer | ScatteredFrame], priority: int | None = None) -> None:
        """Send ``frames``, in order: this network has no priorities."""
        if self.closed:
            return
        if peer in self._made:
            self._made[peer].from_near(frames)
        elif peer in self.accepted:
            self.accepted[peer].from_far(frames)

    def take(self, peer: Peer, frames: Frames) -> None:
        """Put a message into the inbox."""
        if not self.closed:
            self._inbox.append((peer, frames))
            self._wake()

    def recv(self, timeout: float) -> tuple[Peer, Frames] | None:
        """Return the next message, or None."""
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
        """Wake ``recv``."""
        self._rung = True
        self._wake()

    def gathers(self, peer: Peer) -> bool:
        """True: messages are read when they leave."""
        return True

    def detach(self) -> None:
        """Copy what has not left yet."""
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
        """Whether a link that others have made has ended."""
        return peer not in self.accepted

    def abandon(self) -> None:
        """Drop all links, as the system does when a process is killed."""
        self._end()
        for link in (*self._made.values(), *self.accepted.values()):
            link.die(self)

    def close(self, linger: float = 0.0) -> None:
        """Close; what was sent arrives."""
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
