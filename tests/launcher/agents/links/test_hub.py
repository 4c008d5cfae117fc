"""Links over TCP, which agents make."""

from __future__ import annotations

import dataclasses
import selectors
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq
from line import Line
from link_ends import End, settle, turn
from strangers import BYTES, attempt, throw
from waiting import LONG
from zeromq_sockets import Sockets

from kvstore.job.curve_keys import pair
from launcher.agents.links import hub as hubs
from launcher.agents.links.hub import BackLink, Hub
from launcher.agents.links.link import AgentTicket
from launcher.agents.links.protocol import Bye, Note, Output, Ping, Pong

PIECE = 1 << 16


MANY = 40  # pieces: more than are acknowledged at a time, and than a pipe holds


class Wide:
    """A hub with agents' ends, in one loop."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self.selector = selector
        self.hub = Hub("127.0.0.1")
        self.links: list[End] = []
        self.ends: list[End] = []
        self.hub.open(selector, lambda link: self.links.append(End(link, selector)))

    def join(self) -> tuple[End, End]:
        """A new agent's end, and launch.py's."""
        self.ends.append(End(BackLink(AgentTicket.parse(self.hub.ticket.text)), self.selector))
        count = len(self.links)
        self.ends[-1].link.send(Ping())
        self.until(lambda: len(self.links) > count and self.links[-1].said == [Ping()])
        return self.ends[-1], self.links[-1]

    def until(self, condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + LONG
        while not condition():
            assert time.monotonic() < deadline, "waited in vain"
            turn(self.selector, 0.05)
            for end in self.ends:
                end.link.poll()

    def close(self) -> None:
        for end in self.ends:
            end.link.close()
        self.hub.close()


@pytest.fixture
def wide(selector: selectors.BaseSelector) -> Iterator[Wide]:
    made = Wide(selector)
    yield made
    made.close()


def test_agents_come_back_each_to_a_link_of_its_own(wide: Wide) -> None:
    (a, to_a), (b, to_b) = wide.join(), wide.join()
    to_b.link.send(Note("b"))
    to_a.link.send(Note("a"))
    b.link.send(Note("from b"))
    wide.until(lambda: a.said and b.said and len(to_b.said) == 2)
    assert (a.said, b.said) == ([Note("a")], [Note("b")])
    assert (to_a.said, to_b.said) == ([Ping()], [Ping(), Note("from b")])


def test_an_agent_waits_until_its_output_is_taken(wide: Wide) -> None:
    agent, there = wide.join()
    there.link.reading(False)
    for _ in range(MANY):
        agent.link.send(Output(0, 1, [bytes(PIECE)]))
    agent.link.send(Pong())
    wide.until(lambda: there.said[-1] == Pong())
    there.link.send(Note("x"))
    wide.until(lambda: agent.said == [Note("x")])
    assert agent.link.pending == MANY * PIECE
    there.link.reading(True)
    wide.until(lambda: agent.link.pending < MANY * PIECE / 4)
    assert agent.said == [Note("x")]
    assert there.taken == MANY * PIECE


def test_what_was_said_before_the_end_arrives(wide: Wide) -> None:
    agent, there = wide.join()
    for number in range(2000):  # more than the hub takes at a time
        agent.link.send(Note(str(number)))
    agent.link.send(Bye("done"))
    agent.link.close()
    agent.link.close()
    agent.link.send(Ping())
    wide.until(lambda: there.said[-1] == Bye("done"))
    assert there.said == [Ping(), *(Note(str(number)) for number in range(2000)), Bye("done")]
    assert agent.ends == there.ends == []


def test_what_makes_no_sense_ends_that_link_alone(wide: Wide, monkeypatch: pytest.MonkeyPatch) -> None:
    (bad, to_bad), (good, to_good) = wide.join(), wide.join()
    with monkeypatch.context() as patched:
        patched.setattr(hubs.wire, "encode", lambda _: [b"nonsense"])
        bad.link.send(Ping())
    bad.link.send(Note("never heard"))
    good.link.send(Note("still here"))
    wide.until(lambda: to_bad.ends and len(to_good.said) == 2)
    to_bad.link.send(Note("to nobody"))
    to_good.link.send(Ping())
    wide.until(lambda: good.said)
    assert len(to_bad.ends) == 1
    assert to_bad.said == [Ping()]
    assert bad.said == []


def test_what_makes_no_sense_ends_an_agents_link(wide: Wide, monkeypatch: pytest.MonkeyPatch) -> None:
    agent, there = wide.join()
    with monkeypatch.context() as patched:
        patched.setattr(hubs.wire, "encode", lambda _: [b"nonsense"])
        there.link.send(Ping())
    there.link.send(Ping())
    wide.until(lambda: agent.ends)
    assert len(agent.ends) == 1
    assert agent.said == []


def test_strangers_are_refused(wide: Wide) -> None:
    agent, there = wide.join()
    ticket = wide.hub.ticket
    attempt(ticket.endpoint, ticket.server_key, *pair())  # a key that nobody has given it
    attempt(ticket.endpoint)
    throw(ticket.endpoint, BYTES["no security"])
    throw(ticket.endpoint, BYTES["noise"])
    agent.link.send(Note("still here"))
    wide.until(lambda: len(there.said) == 2)
    assert len(wide.links) == 1


def test_an_agent_learns_that_its_connection_has_broken(wide: Wide) -> None:
    """What was under way is lost, and launch.py does not know the next connection for the same."""
    ticket = wide.hub.ticket
    line = Line(ticket.endpoint)
    try:
        end = End(BackLink(dataclasses.replace(ticket, endpoint=line.endpoint)), wide.selector)
        wide.ends.append(end)
        end.link.send(Ping())
        wide.until(lambda: wide.links and wide.links[0].said == [Ping()])
        line.cut()
        wide.until(lambda: end.ends)
        assert end.ends == ["the connection to launch.py has broken"]
        end.link.send(Note("nobody hears this"))
        assert len(wide.links) == 1
    finally:
        for one in wide.ends:
            one.link.close()
        line.close()


def test_an_agent_talks_to_launch_py_alone(wide: Wide, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else listens there, who has not its secret key."""
    ticket = wide.hub.ticket
    other = Hub("127.0.0.1")
    heard: list[Any] = []
    with selectors.DefaultSelector() as selector:
        other.open(selector, heard.append)
        sockets = Sockets(monkeypatch)
        link = BackLink(AgentTicket(other.ticket.endpoint, ticket.server_key, ticket.public, ticket.secret))
        router = sockets.last(zmq.ROUTER)
        monitor = router.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_DISCONNECTED
        )
        end = End(link, selector)
        link.send(Ping())
        assert monitor.poll(LONG * 1000), "not refused"
        router.disable_monitor()
        monitor.close()
        settle(selector)
        assert (heard, end.said) == ([], [])
        link.close()
        other.close()


def test_an_address_that_is_not_ours_makes_no_hub() -> None:
    from kvstore.errors import ConfigError

    with pytest.raises(ConfigError, match=r"cannot listen at tcp://198\.51\.100\.1:0"):
        Hub("198.51.100.1")
