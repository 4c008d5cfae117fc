"""What the links of a simulated job have in common: what may happen to them, whose they are, and what has happened.

What members report of themselves arrives at once and is not counted, so that what a seed does to all else does not
depend on it.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from simulation.world import Task, World

from kvstore import wire
from kvstore.transport import Peer

if TYPE_CHECKING:
    from simulation.link import SimulatedLink
    from simulation.transport import SimulatedTransport


@dataclass(frozen=True)
class Weather:
    """What links are like: mean delays, and which parts of deliveries cut their link, and of messages come twice."""

    delay_s: float = 0.002
    cut: float = 0.0
    repeat: float = 0.0
    redial_s: float = 0.05


class Process:
    """What dies as one: the tasks and the ends of links of one member. Its first task is its program."""

    def __init__(self, name: str, start: int = 1) -> None:
        self.name = name
        self.start = start
        self.dead = self.stopped = False
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
        self.stopped = True
        for task in self.tasks:
            task.stop()

    def resume(self) -> None:
        self.stopped = False
        for task in self.tasks:
            task.resume()


class Network:
    """All links of one job.

    Attributes:
        deliveries: how many messages have arrived.
        cuts: how many links have been cut.
        traffic: bytes that have arrived, by the names of the sender and the receiver.
        late_s: by the names of sender and receiver, how much later messages between them arrive.
        on_delivery: called after each message has been put into its inbox.
        shares: whether members on one network are taken to read each other's memory.
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
        self.shares = False
        self.late_s: dict[tuple[str, str], float] = {}
        self.listeners: dict[str, SimulatedTransport] = {}
        self._links: list[SimulatedLink] = []
        self._parted: set[frozenset[str]] = set()
        self._numbers = itertools.count()
        self._events: list[tuple[float, str, str, list[bytes] | None]] = []

    def new_peer(self) -> Peer:
        return b"%d" % next(self._numbers)

    def add(self, link: SimulatedLink) -> None:
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
        return frozenset((one, other)) in self._parted

    def delay(self, mean_s: float | None = None) -> float:
        return self.dice.expovariate(1 / (mean_s or self.weather.delay_s))

    def note(self, source: str, target: str, frames: Sequence[wire.Buffer] | None) -> None:
        """Keep a line for the trace; None where a link has been cut."""
        copied = None if frames is None else [bytes(frame) for frame in frames]
        self._events.append((self.world.now, source, target, copied))
        self.traffic[source, target] += sum(map(len, copied or ()))

    def trace(self, most: int = 200) -> str:
        """Return what has happened on the links, the latest last."""
        lines = []
        for now, source, target, frames in self._events[-most:]:
            what = "is cut" if frames is None else "is made anew" if not frames else repr(wire.decode(frames))[:150]
            lines.append(f"{now:.4f} {source} -> {target}: {what}")
        return "\n".join(lines)
