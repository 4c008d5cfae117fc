"""Agents as launch.py sees them, before a job and in it: links are lists, and the clock is a number."""

from __future__ import annotations

import os
import selectors
import signal
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.wire import Message
from launcher.agents import fleet as fleet_module
from launcher.agents import remote as remote_module
from launcher.agents import roll_call as roll_call_module
from launcher.agents.fleet import Fleet
from launcher.agents.links import protocol as p
from launcher.agents.remote import RemoteAgent
from launcher.agents.roll_call import Interrupted, RollCall, report
from launcher.errors import LaunchError
from launcher.supervision.exits import Exit
from launcher.supervision.signals import SignalQueue

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

    def exited(self, index: int, how: Exit) -> None:
        self.events.append(("exited", index, how))

    def say(self, text: str) -> None:
        self.events.append(("say", text))

    @property
    def exits(self) -> list[tuple[int, Exit]]:
        return [(event[1], event[2]) for event in self.events if event[0] == "exited"]

    @property
    def said(self) -> list[str]:
        return [event[1] for event in self.events if event[0] == "say"]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in (fleet_module, remote_module, roll_call_module):
        monkeypatch.setattr(module, "time", made)
    return made


@pytest.fixture
def selector() -> Iterator[selectors.BaseSelector]:
    with selectors.DefaultSelector() as made:
        yield made


def remote(host: str = "node", carrier: Bringer | None = None, **options: Any) -> tuple[RemoteAgent, Wire]:
    wire = Wire()
    made = RemoteAgent(host, wire, carrier, **options)  # type: ignore[arg-type]
    made.open(None)  # type: ignore[arg-type]
    return made, wire


def start(number: int) -> p.StartTasks:
    return p.StartTasks(f"job {number}", b"", [], [], LIMIT_S, 0, [])


class Cast:
    """A fleet of two agents: the first has the tasks 1 and 2, the second 3."""

    def __init__(self, selector: selectors.BaseSelector, clock: Clock, limit_s: float = LIMIT_S) -> None:
        self.carriers = [Bringer("ssh to a"), Bringer("ssh to b")]
        (self.a, self.to_a), (self.b, self.to_b) = remote("a", self.carriers[0]), remote("b", self.carriers[1])
        self.a.indices, self.b.indices = [1, 2], [3]
        self.fleet = Fleet([self.a, self.b], {self.a: start(0), self.b: start(1)}, limit_s)
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


@pytest.fixture
def cast(selector: selectors.BaseSelector, clock: Clock) -> Cast:
    made = Cast(selector, clock)
    made.start()
    return made


# ---- a remote


def test_what_an_agent_has_said_is_kept_until_somebody_listens(clock: Clock) -> None:
    there, wire = remote()
    assert there.said(p.Hello) is None
    wire.hears(HELLO)
    wire.hears(p.Pong())
    assert there.said(p.Hello) == HELLO
    heard: list[Message] = []
    there.handler = lambda _, message: heard.append(message)
    clock.now += 5
    wire.hears(p.Note("x"))
    assert heard == [p.Note("x")]
    assert there.said(p.Note) is None
    assert there.heard == clock.now


def test_an_agent_is_lost_once(clock: Clock) -> None:
    there, wire = remote()
    losses: list[RemoteAgent] = []
    there.on_loss = losses.append
    wire.ends("it was closed")
    there.lose("again", 7)
    assert (there.lost, there.code, losses, wire.closed) == ("it was closed", 1, [there], 1)
    there.send(p.Ping())
    assert wire.sent == []


def test_whoever_has_brought_an_agent_knows_why_it_ended(clock: Clock) -> None:
    carrier = Bringer(how=Exit(code=255), explanation="connection closed")
    there, wire = remote(carrier=carrier, hint=lambda said: f"about {said}")
    wire.ends("it was closed")
    assert there.lost == "ssh to node exited with code 255: connection closed\n(about connection closed)"


def test_or_what_came_instead_of_an_agent_tells(clock: Clock) -> None:
    carrier = Bringer()
    carrier.link.preamble = "This account is not available"
    there, wire = remote(carrier=carrier)
    wire.ends("it was closed")
    assert there.lost == "it was closed: This account is not available"


# ---- before a job


@pytest.fixture
def roll_call(selector: selectors.BaseSelector) -> Iterator[RollCall]:
    with SignalQueue() as signals:
        yield RollCall(selector, signals)


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


def test_all_are_asked_at_once_and_those_that_are_fit_go_on(clock: Clock) -> None:
    (a, to_a), (b, to_b) = remote("a"), remote("b")
    for wire in (to_a, to_b):
        wire.reply = lambda message: p.Surveyed("10.0.0.1", "", False, 1, "") if isinstance(message, p.Survey) else None
    question = p.Survey("", "", b"", False, [])
    roll_call = passing(clock)
    assert roll_call.ask({a: question, b: question}, p.Surveyed, 5, lambda _: "") == [a, b]
    assert to_a.sent == to_b.sent == [question]
    roll_call.conclude(2)


def test_one_report_for_all_hosts(clock: Clock) -> None:
    names = ("fine", "lost", "silent", "talkative", "unfit", "late")
    there = {name: remote(name) for name in names}
    there["talkative"] = remote("talkative", Bringer(explanation="Password:"))
    there["lost"][0].lose("ssh to lost exited with code 255: no route\n(it is down)")
    there["fine"][1].hears(HELLO)
    there["unfit"][1].hears(HELLO)
    roll_call = passing(clock, {clock.now + 3: lambda: there["late"][1].hears(HELLO)})
    remotes = [one for one, _ in there.values()]
    fit = roll_call.expect(remotes, p.Hello, 30.0, lambda one: "has no python" if one.host == "unfit" else "")
    assert [one.host for one in fit] == ["fine", "late"]
    there["late"][0].lose("the link broke")
    assert roll_call.expect(fit, p.Pong, 1.5, lambda _: "") == []
    with pytest.raises(LaunchError) as caught:
        roll_call.conclude(len(remotes))
    assert caught.value.exit_code == 1
    assert str(caught.value).splitlines() == [
        "nothing was started; 6 of 6 hosts cannot take part:",
        "  lost: ssh to lost exited with code 255: no route",
        "    (it is down)",
        "  silent: no answer within 30 s",
        "  talkative: no answer within 30 s; it has said: Password:",
        "  unfit: has no python",
        "  fine: no answer within 1.5 s",
        "  late: the link broke",
    ]


def test_nothing_wrong_nothing_said(clock: Clock) -> None:
    passing(clock).conclude(3)
    assert str(report(["a: b"], 2)) == "nothing was started; 1 of 2 hosts cannot take part:\n  a: b"


def test_agents_are_kept_patient(clock: Clock) -> None:
    there, wire = remote()
    assert not passing(clock).wait(lambda: False, 31, lambda: [there])
    assert wire.sent == [p.Ping()] * 6


def test_waiting_ends_when_it_is_done_or_time_is_up(clock: Clock) -> None:
    began = clock.now
    assert passing(clock).wait(lambda: clock.now > began + 2, 5, list)
    assert clock.now < began + 2.2
    assert passing(clock).wait(lambda: True, 0, list)
    assert not passing(clock).wait(lambda: False, 0, list)


@pytest.mark.usefixtures("hangups")
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_interrupts_and_a_childs_end_does_not(roll_call: RollCall, signum: int) -> None:
    os.kill(os.getpid(), signal.SIGCHLD)
    os.kill(os.getpid(), signum)
    with pytest.raises(Interrupted) as caught:
        roll_call.wait(lambda: False, 60, list)
    assert caught.value.signum == signum


def test_what_is_ready_is_called(roll_call: RollCall, selector: selectors.BaseSelector) -> None:
    read, write = os.pipe()
    got: list[bytes] = []
    selector.register(read, selectors.EVENT_READ, lambda: got.append(os.read(read, 9)))
    os.write(write, b"x")
    assert roll_call.wait(lambda: bool(got), 60, list)
    roll_call.leave()
    selector.unregister(read)
    assert not selector.get_map()
    os.close(read)
    os.close(write)


# ---- the job


def test_each_agent_is_told_its_tasks(cast: Cast) -> None:
    assert (cast.to_a.sent, cast.to_b.sent) == ([start(0)], [start(1)])
    assert cast.fleet.leftovers()


def test_output_and_exits_go_to_the_sink(cast: Cast) -> None:
    cast.to_a.hears(p.Started())
    cast.to_a.hears(p.Output(1, 1, [b"he", b"llo\n"]))
    cast.to_a.hears(p.Exited(1, 7, 0))
    cast.to_a.hears(p.Note("the keeper died"))
    assert cast.sink.events == [
        ("output", 1, 1, b"hello\n"),
        ("output", 1, 1, b""),
        ("output", 1, 2, b""),
        ("exited", 1, Exit(code=7)),
        ("say", "a: the keeper died"),
    ]


def test_an_agent_speaks_for_its_own_tasks_alone(cast: Cast) -> None:
    for index in (0, 3, 4096):
        cast.to_a.hears(p.Output(index, 1, [b"forged"]))
        cast.to_a.hears(p.Exited(index, 0, 0))
    assert cast.sink.events == []


def test_a_task_ends_once(cast: Cast) -> None:
    for code in (0, 7):
        cast.to_a.hears(p.Exited(1, code, 0))
    cast.to_a.ends("it was closed")
    assert [(index, how.code) for index, how in cast.sink.exits] == [(1, 0), (2, 1)]


def test_nothing_is_left_when_all_agents_say_so(cast: Cast) -> None:
    cast.to_a.hears(p.Empty())
    assert cast.fleet.leftovers()
    cast.to_b.hears(p.Empty())
    assert not cast.fleet.leftovers()


def test_a_lost_agents_tasks_have_failed_and_nothing_of_it_is_waited_for(cast: Cast) -> None:
    cast.to_a.ends("it was closed")
    assert cast.sink.exits == [(index, Exit(1, text="was lost: it was closed")) for index in (1, 2)]
    cast.to_b.hears(p.Empty())
    assert not cast.fleet.leftovers()
    cast.fleet.signal(15)
    assert cast.to_a.sent == [start(0)]
    assert cast.to_b.sent == [start(1), p.Signal(15)]


def test_one_that_goes_says_why(cast: Cast) -> None:
    cast.to_b.hears(p.Bye("it was sent SIGTERM"))
    assert cast.sink.exits == [(3, Exit(1, text="was lost: its agent ended: it was sent SIGTERM"))]
    assert cast.to_b.closed


def test_one_that_cannot_start_says_why(cast: Cast) -> None:
    cast.to_b.hears(p.Refused("no such command", 127))
    cast.to_b.hears(p.Refused("again", 1))
    cast.to_a.hears(p.Refused("for no reason", 0))
    text = "was not started: for no reason"
    assert cast.sink.exits == [
        (3, Exit(127, text="was not started: no such command")),
        (1, Exit(1, text=text)),
        (2, Exit(1, text=text)),
    ]
    assert not cast.fleet.leftovers()


def test_agents_are_asked_by_the_second_and_given_up_when_silent(cast: Cast) -> None:
    cast.wait(1, cast.to_a, cast.to_b)
    cast.wait(LIMIT_S, cast.to_a)
    assert cast.sink.exits == []
    assert cast.to_a.sent[1:] == [p.Ping()] * 11
    cast.fleet.collect()
    assert len(cast.to_a.sent) == 12
    cast.wait(1, cast.to_a)
    assert cast.sink.exits == [(3, Exit(1, text="was lost: nothing was heard of it for 10 s"))]


def test_silence_before_the_job_does_not_count(selector: selectors.BaseSelector, clock: Clock) -> None:
    """Other hosts may have taken their time to answer."""
    cast = Cast(selector, clock)
    clock.now += LIMIT_S + 1
    cast.start()
    cast.wait(1)
    assert cast.sink.exits == []


def test_a_limit_shorter_than_pings_are_apart_is_no_limit(selector: selectors.BaseSelector, clock: Clock) -> None:
    cast = Cast(selector, clock, limit_s=0.2)
    cast.start()
    cast.wait(5, cast.to_a, cast.to_b)
    cast.wait(1)
    assert cast.sink.exits == []
    cast.wait(2, cast.to_a)
    assert cast.sink.exits == [(3, Exit(1, text="was lost: nothing was heard of it for 2 s"))]


def test_when_what_has_brought_an_agent_ends_what_it_carried_comes_first(cast: Cast) -> None:
    cast.carriers[0].how = Exit(code=255)
    cast.carriers[0].explanation = "broken pipe"
    cast.wait(1, cast.to_a, cast.to_b)
    cast.to_a.hears(p.Exited(1, 0, 0))
    assert cast.sink.exits == [(1, Exit())]
    cast.wait(1, cast.to_b)
    assert cast.sink.exits[1:] == [(2, Exit(255, text="was lost: ssh to a exited with code 255: broken pipe"))]


def test_one_that_ends_well_without_a_goodbye_has_failed_all_the_same(cast: Cast) -> None:
    cast.carriers[1].how = Exit()
    cast.wait(2, cast.to_a, cast.to_b)
    assert cast.sink.exits == [(3, Exit(1, text="was lost: ssh to b exited with code 0"))]


def test_an_agent_that_was_lost_before_the_start(selector: selectors.BaseSelector, clock: Clock) -> None:
    cast = Cast(selector, clock)
    cast.to_b.ends("it was closed")
    cast.start()
    assert cast.sink.exits == [(3, Exit(1, text="was lost: it was closed"))]
    assert cast.to_b.sent == []


def test_what_carriers_say_is_shown_with_its_host(cast: Cast) -> None:
    assert cast.carriers[0].on_line is not None
    cast.carriers[0].on_line("disk quota exceeded")
    assert cast.sink.said == ["a: disk quota exceeded"]


@pytest.fixture
def brought(selector: selectors.BaseSelector, clock: Clock) -> Cast:
    """Both by one mpirun."""
    made = Cast(selector, clock)
    made.a.carrier = made.b.carrier = made.carriers[0]  # type: ignore[assignment]
    made.carriers[0].name = made.carriers[0].source = "mpirun"
    made.start()
    made.wait(1, made.to_a, made.to_b)
    return made


def test_what_one_carrier_of_many_says_is_its_own(brought: Cast) -> None:
    assert brought.carriers[0].on_line is not None
    brought.carriers[0].on_line("hello")
    assert brought.sink.said == ["mpirun: hello"]


def test_agents_that_were_ended_by_what_has_brought_them_let_that_tell_why(brought: Cast) -> None:
    brought.to_a.hears(p.Bye("it was sent SIGTERM"))
    assert brought.sink.exits == []
    brought.carriers[0].how = Exit(code=3)
    brought.wait(2, brought.to_b)
    text = "was lost: mpirun exited with code 3"
    assert brought.sink.exits == [(index, Exit(3, text=text)) for index in (1, 2, 3)]


def test_one_that_was_ended_alone_is_lost_a_little_later(brought: Cast) -> None:
    brought.to_a.hears(p.Bye("it was sent SIGTERM"))
    brought.wait(3, brought.to_b)
    assert brought.sink.exits == []
    brought.wait(1, brought.to_b)
    text = "was lost: its agent ended: it was sent SIGTERM"
    assert brought.sink.exits == [(index, Exit(1, text=text)) for index in (1, 2)]


def test_a_second_in_which_it_was_stopped_itself_is_nobodys_silence(cast: Cast, clock: Clock) -> None:
    cast.wait(1, cast.to_a, cast.to_b)
    clock.now += 100
    cast.fleet.collect()
    assert cast.sink.exits == []


def test_a_reader_who_is_slow_holds_the_agents_back(cast: Cast) -> None:
    cast.fleet.reading(False)
    cast.fleet.reading(True)
    assert cast.to_a.wanted == cast.to_b.wanted == [False, True]


def test_all_are_sent_away_and_waited_for(selector: selectors.BaseSelector, clock: Clock) -> None:
    cast = Cast(selector, clock)
    cast.start()
    for wire in (cast.to_a, cast.to_b):
        wire.reply = lambda message: p.Bye() if isinstance(message, p.Bye) else None
    cast.fleet.close()
    cast.fleet.close()
    assert [wire.sent[1:] for wire in (cast.to_a, cast.to_b)] == [[p.Bye()]] * 2
    assert cast.sink.exits == []
    assert cast.to_a.closed


def test_one_that_does_not_go_is_waited_for_so_long(clock: Clock) -> None:
    cast = Cast(Passing(clock), clock)  # type: ignore[arg-type]
    cast.start()
    cast.to_a.reply = lambda message: p.Bye() if isinstance(message, p.Bye) else None
    began = clock.now
    cast.fleet.close()
    assert 2.9 < clock.now - began < 3.2
    assert cast.to_b.closed
    cast.to_b.ends("late")
    assert cast.sink.exits == []


def test_the_last_words_come_while_it_is_waited(clock: Clock) -> None:
    def last() -> None:
        cast.to_a.hears(p.Output(1, 1, [b"bye\n"]))
        cast.to_a.hears(p.Exited(1, 0, 15))
        cast.to_a.hears(p.Bye())
        cast.to_b.hears(p.Bye())

    cast = Cast(Passing(clock, {clock.now + 1: last}), clock)  # type: ignore[arg-type]
    cast.start()
    cast.fleet.close()
    assert cast.sink.events[0] == ("output", 1, 1, b"bye\n")
    assert cast.sink.exits == [(1, Exit(signum=15))]
    assert clock.now < 1001.2
