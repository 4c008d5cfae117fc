"""All agents are asked before a job: links are lists, and the clock is a number."""

from __future__ import annotations

import os
import selectors
import signal
from collections.abc import Iterator
from typing import cast

import pytest
from agent_doubles import HELLO, Bringer, Clock, passing, remote

import kvstore
from kvstore import wire
from launcher.agents.fleet import RemoteAgent
from launcher.agents.links import protocol as p
from launcher.agents.roll_call import (
    Interrupted,
    RollCall,
    has_servers,
    report,
    surveyed,
    unfit,
    unreached,
    version_problem,
)
from launcher.errors import LaunchError
from launcher.supervision.crew import SignalQueue


@pytest.fixture
def roll_call(selector: selectors.BaseSelector) -> Iterator[RollCall]:
    with SignalQueue() as signals:
        yield RollCall(selector, signals)


def test_all_are_asked_at_once_and_those_that_are_fit_go_on(clock: Clock) -> None:
    (a, to_a), (b, to_b) = remote("a"), remote("b")
    for at in (to_a, to_b):
        at.reply = lambda message: p.Surveyed("10.0.0.1", "", False, 1, "") if isinstance(message, p.Survey) else None
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
        "  talkative: no answer within 30 s; it printed: Password:",
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


class Answering:
    """An agent that has said this."""

    def __init__(self, *messages: wire.Message) -> None:
        self._said = {type(message): message for message in messages}
        self.members: list[tuple[str, int]] = [("worker", 0)]

    def said(self, kind: type[wire.Message]) -> wire.Message | None:
        return self._said.get(kind)


def host(*messages: wire.Message) -> RemoteAgent:
    return cast(RemoteAgent, Answering(*messages))


def test_versions() -> None:
    assert version_problem(host(p.Hello(kvstore.__version__, "3.11", "node1", -1, ""))) == ""
    assert version_problem(host(p.Hello("0.0.9", "3.11.7", "node1", -1, ""))) == (
        f"has torch-kvstore 0.0.9 (Python 3.11.7), but this machine has {kvstore.__version__}; install the same"
    )


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (p.Surveyed("10.0.0.1", "", False, 9000, ""), ""),
        (p.Surveyed("", "", False, 0, "there is no directory /x"), "there is no directory /x"),
        (p.Surveyed("nowhere", "", False, 9000, ""), "reports the address 'nowhere', which is not an IP address"),
        (p.Surveyed("10.0.0.1", "", False, 0, ""), "its agent does not listen"),
    ],
)
def test_addresses(answer: p.Surveyed, problem: str) -> None:
    assert surveyed(host(answer)) is answer
    assert unfit(host(answer)) == problem


def test_who_cannot_be_reached() -> None:
    assert unreached(host(p.Probed([]))) == unreached(host()) == ""
    assert unreached(host(p.Probed([["this machine", "refused"], ["node2", "silent"]]))) == (
        "cannot reach this machine (refused), node2 (silent); name the network that all share with --interface, "
        "or this machine's --host-ip"
    )


def test_who_must_be_reached() -> None:
    agent = host()
    assert not has_servers(agent)
    agent.members = [("worker", 0), ("standby", 1)]
    assert has_servers(agent)
