"""Stand-ins for agents, their links and carriers, and a clock that tests move."""

from __future__ import annotations

import selectors
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from kvstore.job.exit_report import ExitReport
from kvstore.job.processes import Exit
from kvstore.wire import Message
from launcher.agents.fleet import Fleet, RemoteAgent
from launcher.agents.links import protocol as p
from launcher.agents.roll_call import RollCall

LIMIT_S = 10.0


HELLO = p.Hello("0.1.0", "3.11", "node", 0, "")


class Clock:
    """Passes when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Wire:
    """A link that keeps what is sent; `hears` and `ends` are the other end's part."""

    pending = unsent = 0

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.wanted: list[bool] = []
        self.closed = 0
        self.reply: Callable[[Message], Message | None] = lambda _: None

    def open(self, selector: Any, on_message: Callable[[Message], None], on_end: Callable[[str], None]) -> None:
        self.hears, self.ends = on_message, on_end

    def send(self, message: Message) -> None:
        if not self.closed:
            self.sent.append(message)
            if (answer := self.reply(message)) is not None:
                self.hears(answer)

    def reading(self, wanted: bool) -> None:
        self.wanted.append(wanted)

    def poll(self) -> None:
        """Nothing."""

    def close(self) -> None:
        self.closed += 1


class Bringer:
    """A carrier that ends when a test says so."""

    source = ""

    def __init__(self, name: str = "ssh to node", how: Exit | None = None, explanation: str = "") -> None:
        self.name, self.how, self.explanation = name, how, explanation
        self.link = SimpleNamespace(preamble="")
        self.on_line: Callable[[str], None] | None = None
        self.signals: list[int] = []

    def poll(self) -> Exit | None:
        return self.how

    def wait(self, seconds: float) -> Exit | None:
        return self.how

    def relay(self, on_line: Callable[[str], None]) -> None:
        self.on_line = on_line

    def signal(self, signum: int) -> None:
        self.signals.append(signum)


class Heard:
    """A sink."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def output(self, index: int, number: int, data: bytes) -> None:
        self.events.append(("output", index, number, data))

    def reported(self, index: int, report: ExitReport) -> None:
        self.events.append(("reported", index, report))

    def exited(self, index: int, how: Exit) -> None:
        self.events.append(("exited", index, how))

    def say(self, text: str, *, secret: bool = False) -> None:
        self.events.append(("say", text))

    @property
    def exits(self) -> list[tuple[int, Exit]]:
        return [(event[1], event[2]) for event in self.events if event[0] == "exited"]

    @property
    def said(self) -> list[str]:
        return [event[1] for event in self.events if event[0] == "say"]


def remote(host: str = "node", carrier: Bringer | None = None, **options: Any) -> tuple[RemoteAgent, Wire]:
    wire = Wire()
    made = RemoteAgent(host, wire, carrier, **options)  # type: ignore[arg-type]
    made.open(None)  # type: ignore[arg-type]
    return made, wire


def start(number: int) -> p.StartTasks:
    return p.StartTasks(f"job {number}", b"", [], [], LIMIT_S, 0, [])


class Cast:
    """A fleet of two agents: the first has the tasks 1 and 2, the second 3."""

    def __init__(
        self, selector: selectors.BaseSelector, clock: Clock, limit_s: float = LIMIT_S, move: Any = None
    ) -> None:
        self.carriers = [Bringer("ssh to a"), Bringer("ssh to b")]
        (self.a, self.to_a), (self.b, self.to_b) = remote("a", self.carriers[0]), remote("b", self.carriers[1])
        self.a.indices, self.b.indices = [1, 2], [3]
        self.fleet = Fleet([self.a, self.b], {self.a: start(0), self.b: start(1)}, limit_s, move)
        self.sink = Heard()
        self._selector, self._clock = selector, clock

    def start(self) -> None:
        self.fleet.start(self._selector, self.sink)

    def wait(self, seconds: float, *alive: Wire) -> None:
        """As the supervisor: `collect` by the second; these agents answer to pings."""
        for _ in range(int(seconds)):
            self._clock.now += 1
            for wire in alive:
                wire.hears(p.Pong())
            self.fleet.collect()


class Passing:
    """A selector for which a second passes whenever it waits."""

    def __init__(self, clock: Clock, events: dict[float, Callable[[], None]] | None = None) -> None:
        self._clock, self._events = clock, events or {}

    def register(self, *_: object) -> None:
        """Nothing is ever ready."""

    unregister = register

    def select(self, timeout: float) -> list[Any]:
        self._clock.now += timeout
        for when in [when for when in self._events if when <= self._clock.now]:
            self._events.pop(when)()
        return []


class NoSignals:
    def take(self) -> list[int]:
        return []


def passing(clock: Clock, events: dict[float, Callable[[], None]] | None = None) -> RollCall:
    return RollCall(Passing(clock, events), NoSignals())  # type: ignore[arg-type]
