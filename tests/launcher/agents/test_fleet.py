"""The agents of a job: links are lists, and the clock is a number."""

from __future__ import annotations

import os
import selectors
import signal
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace

import pytest
from agent_doubles import HELLO, LIMIT_S, Bringer, Cast, Clock, Passing, remote, start
from waiting import LONG, until

from kvstore.job.exit_report import ExitReport
from kvstore.job.processes import Exit
from kvstore.wire import Message
from launcher.agents.fleet import Carrier, RemoteAgent
from launcher.agents.links import protocol as p
from launcher.agents.links.protocol import Note
from launcher.errors import LaunchError
from launcher.supervision.crew import turn


@pytest.fixture
def cast(selector: selectors.BaseSelector, clock: Clock) -> Cast:
    made = Cast(selector, clock)
    made.start()
    return made


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


def test_a_task_is_started_anew_on_another_host(selector: selectors.BaseSelector, clock: Clock) -> None:
    def move(index: int, before: RemoteAgent, remote: RemoteAgent, variables: Mapping[str, str]) -> p.StartTasks:
        before.indices.remove(index)
        remote.indices.append(index)
        return replace(start(1), gpus=int(variables["KVSTORE_START"]))

    cast = Cast(selector, clock, move=move)
    cast.start()
    assert cast.fleet.hosts() == ["a", "b"]
    cast.to_a.hears(p.Exited(2, 0, 0))
    cast.fleet.restart(2, {"KVSTORE_START": "2"}, "b")
    assert cast.to_b.sent == [start(1), replace(start(1), gpus=2)]
    cast.to_b.hears(p.Exited(2, 7, 0))
    cast.fleet.restart(2, {"KVSTORE_START": "3"}, "b")
    assert cast.to_b.sent[-1] == p.StartAgain(2, p.pack({"KVSTORE_START": "3"})), "it is there already"
    assert [(index, how.code) for index, how in cast.sink.exits] == [(2, 0), (2, 7)]
    cast.to_a.ends("it was closed")
    assert cast.fleet.hosts() == ["b"]
    assert [index for index, _ in cast.sink.exits] == [2, 2, 1], "what has moved away is not lost with it"


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


def test_a_task_is_started_again_where_it_was(cast: Cast) -> None:
    cast.to_b.hears(p.Exited(3, 0, 9))
    cast.to_b.hears(p.Empty())
    assert cast.fleet.can_restart(3)
    cast.fleet.restart(3, {"KVSTORE_START": "2"})
    assert cast.to_b.sent == [start(1), p.StartAgain(3, [b"KVSTORE_START", b"2"])]
    cast.to_a.hears(p.Empty())
    assert cast.fleet.leftovers()
    cast.to_b.hears(p.Exited(3, 7, 0))
    assert cast.sink.exits == [(3, Exit(signum=9)), (3, Exit(code=7))]


def test_a_signal_for_one_task_goes_to_its_agent(cast: Cast) -> None:
    assert cast.fleet.signal_task(3, 19)
    assert (cast.to_a.sent[1:], cast.to_b.sent[1:]) == ([], [p.SignalTask(3, 19)])
    cast.to_b.hears(p.Exited(3, 0, 9))
    assert not cast.fleet.signal_task(3, 19)
    assert not cast.fleet.signal_task(4, 19)


def test_but_not_if_its_agent_is_gone(cast: Cast) -> None:
    cast.to_b.ends("it was closed")
    assert [cast.fleet.can_restart(index) for index in (1, 2, 3, 4)] == [True, True, False, False]
    cast.fleet.restart(3, {})
    assert cast.to_b.sent == [start(1)]


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
    assert cast.sink.exits == [(3, Exit(1, text="was lost: it was silent for 10 s"))]


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
    assert cast.sink.exits == [(3, Exit(1, text="was lost: it was silent for 2 s"))]


def test_reports_of_its_own_tasks_are_passed_on(cast: Cast) -> None:
    report = ExitReport("ValueError: no", "train.py:3", "Traceback\n")
    cast.to_a.hears(p.Reported(1, **asdict(report)))
    cast.to_a.hears(p.Reported(3, **asdict(report)))  # a task of another agent
    assert [event for event in cast.sink.events if event[0] == "reported"] == [("reported", 1, report)]


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


ENV = {"PATH": os.defpath}


class Carriers:
    """Programs that run until the test is over."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self.selector = selector
        self._made: list[Carrier] = []

    def run(self, text: str, linked: bool = False) -> Carrier:
        carrier = Carrier("ssh to node1", ("sh", "-c", text), ENV, linked=linked)
        self._made.append(carrier)
        carrier.open(self.selector)
        return carrier

    def close(self) -> None:
        for carrier in self._made:
            carrier.close()


@pytest.fixture
def carriers(selector: selectors.BaseSelector) -> Iterator[Carriers]:
    made = Carriers(selector)
    yield made
    made.close()
    assert not selector.get_map()


def test_how_it_ended_and_what_it_said(carriers: Carriers) -> None:
    carrier = carriers.run("echo no; echo '  route '; echo; echo to host >&2; exit 255")
    assert carrier.wait(LONG) == carrier.poll() == Exit(code=255)
    assert sorted(carrier.explanation.splitlines()) == ["no", "route", "to host"]


def test_of_a_traceback_only_what_it_says_in_the_end(carriers: Carriers) -> None:
    carrier = carriers.run("printf 'before\\nTraceback (most recent call last):\\n  File x\\nImportError: no\\n'")
    carrier.wait(LONG)
    assert carrier.explanation == "before\nImportError: no"


def test_only_the_last_lines_are_remembered(carriers: Carriers) -> None:
    carrier = carriers.run("seq 100")
    carrier.wait(LONG)
    assert carrier.explanation.splitlines() == [str(number) for number in range(81, 101)]


def test_lines_that_somebody_sees_explain_nothing_twice(carriers: Carriers) -> None:
    carrier = carriers.run("read line; echo one; printf half")
    seen: list[str] = []
    carrier.relay(seen.append)
    carrier.wait(LONG)
    until(lambda: turn(carriers.selector, 0.05) or len(seen) == 2, step=0)
    assert (seen, carrier.explanation) == (["one", "half"], "")


def test_an_agent_that_answers_on_its_streams_is_heard_and_errors_are_not_taken_for_it(carriers: Carriers) -> None:
    carrier = carriers.run("echo banner; echo warning >&2; cat >/dev/null", linked=True)
    assert carrier.link is not None
    ends: list[str] = []
    carrier.link.open(carriers.selector, lambda _: None, ends.append)
    until(lambda: turn(carriers.selector, 0.05) or carrier.explanation, step=0)
    until(lambda: turn(carriers.selector, 0.05) or (carrier.link and carrier.link.preamble), step=0)
    assert (carrier.explanation, carrier.link.preamble, ends) == ("warning", "banner", [])
    carrier.link.send(Note("x"))
    carrier.link.close()  # which ends the program's input, and so the program
    assert carrier.wait(LONG) == Exit()


def test_no_agent_no_link(carriers: Carriers) -> None:
    assert carriers.run("exit 0").link is None


def test_a_signal_reaches_what_it_has_started(carriers: Carriers) -> None:
    carrier = carriers.run("sleep 600 & echo started; wait; sleep 600")
    until(lambda: turn(carriers.selector, 0.05) or carrier.explanation, step=0)
    carrier.signal(signal.SIGTERM)
    assert carrier.wait(LONG) == Exit(signum=15)


def test_one_that_does_not_go_is_killed(carriers: Carriers) -> None:
    carrier = carriers.run("trap '' TERM; echo deaf; while :; do sleep 1; done")
    until(lambda: turn(carriers.selector, 0.05) or carrier.explanation, step=0)
    carrier.close()
    assert carrier.poll() == Exit(signum=9)


def test_a_program_that_is_not_there(selector: selectors.BaseSelector) -> None:
    carrier = Carrier("qsub", ("/no/such/qsub",), ENV, linked=False)
    with pytest.raises(LaunchError, match="cannot start qsub: there is no command /no/such/qsub"):
        carrier.open(selector)
    carrier.close()
