"""Links between launch.py and agents: over pipes, and back over TCP."""

from __future__ import annotations

import dataclasses
import os
import selectors
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from line import Line
from strangers import BYTES, attempt, throw
from waiting import LONG

from kvstore.job.curve_keys import pair
from kvstore.wire import Message, encode
from launcher.agents.links.framing import MAGIC, frame
from launcher.agents.links.hub import BackLink, Hub, HubLink
from launcher.agents.links.link import AgentLink, PipeLink
from launcher.agents.links.protocol import Bye, Note, Output, Ping, Pong
from launcher.agents.links.ticket import AgentTicket

PIECE = 1 << 16
MANY = 40  # pieces: more than are acknowledged at a time, and than a pipe holds


class End:
    """A link, what it has brought, and how it has ended."""

    def __init__(self, link: AgentLink, selector: selectors.BaseSelector) -> None:
        self.link = link
        self.said: list[Message] = []
        self.ends: list[str] = []
        link.open(selector, self.said.append, self.ends.append)

    @property
    def taken(self) -> int:
        return sum(len(part) for message in self.said if isinstance(message, Output) for part in message.buffers)


def turn(selector: selectors.BaseSelector, timeout: float) -> bool:
    ready = selector.select(timeout)
    for key, _ in ready:
        key.data()
    return bool(ready)


def until(selector: selectors.BaseSelector, condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        turn(selector, 0.05)


def settle(selector: selectors.BaseSelector) -> None:
    """Over pipes, what has not happened when nothing is ready will not."""
    while turn(selector, 0):
        pass


@pytest.fixture
def selector() -> Iterator[selectors.BaseSelector]:
    with selectors.DefaultSelector() as made:
        yield made


class Pipes:
    """Both ends of a link over pipes, and the descriptors under it."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        down, up = os.pipe(), os.pipe()
        self.fds = [*down, *up]
        self.agent = End(PipeLink(down[0], up[1], greet=True), selector)
        self.launcher = End(PipeLink(up[0], down[1]), selector)

    def close(self) -> None:
        self.agent.link.close()
        self.launcher.link.close()


@pytest.fixture
def pipes(selector: selectors.BaseSelector) -> Iterator[Pipes]:
    made = Pipes(selector)
    yield made
    made.close()
    for fd in made.fds:
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(fd)


class Half:
    """launch.py's end alone; what the other says, and hears, are bytes."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        (read, self.target), (self.source, write) = os.pipe(), os.pipe()
        self.link = PipeLink(read, write)
        self.end = End(self.link, selector)

    def hang_up(self, what: str) -> None:
        os.close(getattr(self, what))
        setattr(self, what, -1)

    def close(self) -> None:
        self.link.close()
        for fd in (self.target, self.source):
            if fd >= 0:
                os.close(fd)


@pytest.fixture
def half(selector: selectors.BaseSelector) -> Iterator[Half]:
    made = Half(selector)
    yield made
    made.close()


def test_messages_go_both_ways(pipes: Pipes, selector: selectors.BaseSelector) -> None:
    pipes.launcher.link.send(Ping())
    pipes.agent.link.send(Note("a"))
    pipes.agent.link.send(Pong())
    settle(selector)
    assert (pipes.agent.said, pipes.launcher.said) == ([Ping()], [Note("a"), Pong()])
    assert pipes.agent.ends == pipes.launcher.ends == []


def test_a_full_pipe_makes_messages_wait_and_loses_none(pipes: Pipes, selector: selectors.BaseSelector) -> None:
    notes = [Note(f"{number}" * 30000) for number in range(9)] * 3
    for note in notes:
        pipes.launcher.link.send(note)
    waiting = pipes.launcher.link.unsent
    assert waiting > 0
    pipes.launcher.link.send(Ping())
    assert pipes.launcher.link.unsent > waiting
    settle(selector)
    assert pipes.agent.said == [*notes, Ping()]
    assert pipes.launcher.link.unsent == 0


def test_output_that_is_not_taken_holds_the_agent_back_and_nothing_else(
    pipes: Pipes, selector: selectors.BaseSelector
) -> None:
    pipes.launcher.link.reading(False)
    for _ in range(MANY):
        pipes.agent.link.send(Output(0, 1, [bytes(PIECE)]))
    pipes.agent.link.send(Pong())
    settle(selector)
    assert pipes.agent.link.pending == MANY * PIECE
    assert pipes.launcher.said[-1] == Pong()
    pipes.launcher.link.reading(True)
    settle(selector)
    assert pipes.agent.link.pending < MANY * PIECE / 4
    assert pipes.launcher.taken == MANY * PIECE


def test_the_end_is_told_once_to_the_one_who_has_not_closed(pipes: Pipes, selector: selectors.BaseSelector) -> None:
    pipes.agent.link.send(Note("last words"))
    pipes.agent.link.close()
    pipes.agent.link.close()
    pipes.agent.link.send(Ping())
    settle(selector)
    assert pipes.launcher.said == [Note("last words")]
    assert pipes.launcher.ends == ["it was closed"]
    assert pipes.agent.ends == []
    pipes.launcher.link.send(Ping())
    pipes.launcher.link.reading(False)
    settle(selector)
    assert pipes.launcher.ends == ["it was closed"]
    assert pipes.launcher.link.unsent == 0


def test_what_has_come_before_the_end_is_heard(half: Half, selector: selectors.BaseSelector) -> None:
    os.write(half.target, MAGIC + frame(encode(Note("why"))))
    half.hang_up("target")
    half.hang_up("source")
    half.link.send(Ping())  # nobody takes it
    settle(selector)
    assert half.end.said == [Note("why")]
    assert half.end.ends == ["it was closed"]


def test_a_banner_is_no_end(half: Half, selector: selectors.BaseSelector) -> None:
    os.write(half.target, b"Welcome!\n")
    settle(selector)
    assert half.link.preamble == "Welcome!"
    os.write(half.target, MAGIC + frame(encode(Ping())))
    settle(selector)
    assert half.end.said == [Ping()]
    assert half.link.preamble == ""


@pytest.mark.parametrize(
    ("data", "how"),
    [
        (MAGIC + bytes(4), "a message of 0 frames"),
        (MAGIC + frame([b"\xff"]), "a header that is not"),
        (MAGIC + frame([b"", b""]), "a header that is not msgpack"),
    ],
)
def test_garbage_ends_a_link(half: Half, selector: selectors.BaseSelector, data: bytes, how: str) -> None:
    os.write(half.target, data + frame(encode(Ping())))
    settle(selector)
    assert half.end.said == []
    assert len(half.end.ends) == 1
    assert how in half.end.ends[0]


def test_nothing_comes_after_the_close(selector: selectors.BaseSelector) -> None:
    (read, target), (source, write) = os.pipe(), os.pipe()
    link, said = PipeLink(read, write), []

    def leave(message: Message) -> None:
        said.append(message)
        link.close()

    link.open(selector, leave, pytest.fail)
    os.write(target, MAGIC + frame(encode(Bye())) + frame(encode(Ping())))
    settle(selector)
    assert said == [Bye()]
    os.close(target)
    os.close(source)


def test_a_link_that_has_ended_leaves_its_numbers_to_others(half: Half, selector: selectors.BaseSelector) -> None:
    """Both of its descriptors were ready, and the first has ended it."""
    while not half.link.unsent:
        half.link.send(Note("x" * 60000))
    os.read(half.source, 1 << 20)
    os.write(half.target, MAGIC + bytes(4))
    ready = [key for key, _ in selector.select(0)]
    assert len(ready) == 2
    for first, second in (ready, ready[::-1]):
        if first.events == selectors.EVENT_READ:
            first.data()
            assert len(half.end.ends) == 1
            others = [os.pipe() for _ in range(3)]
            second.data()
            first.data()
            for other, _ in others:
                os.set_blocking(other, False)
                with pytest.raises(BlockingIOError):
                    os.read(other, 1)
            for number in (fd for ends in others for fd in ends):
                os.close(number)
    assert len(half.end.ends) == 1
    assert half.link.unsent == 0


def test_it_does_not_matter_that_a_link_was_never_opened() -> None:
    fds = [*os.pipe(), *os.pipe()]
    for link in (PipeLink(fds[0], fds[3]), PipeLink(fds[2], fds[1])):
        link.close()
        link.close()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.binary(max_size=200000), max_size=6), st.lists(st.booleans(), max_size=6))
def test_all_output_arrives_in_order(pieces: list[bytes], wishes: list[bool]) -> None:
    with selectors.DefaultSelector() as selector:
        pipes = Pipes(selector)
        for number, piece in enumerate(pieces):
            pipes.agent.link.send(Output(0, 1, [piece]))
            if number < len(wishes):
                pipes.launcher.link.reading(wishes[number])
            turn(selector, 0)
        pipes.launcher.link.reading(True)
        settle(selector)
        assert [bytes(message.buffers[0]) for message in pipes.launcher.said] == pieces  # type: ignore[attr-defined]
        pipes.close()


def test_a_pipe_that_breaks_in_another_way(half: Half, selector: selectors.BaseSelector) -> None:
    with Path("/dev/full").open("wb") as full:
        os.dup2(full.fileno(), half.link._target)
    half.link.send(Ping())
    assert half.end.ends == ["No space left on device"]


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


def test_what_makes_no_sense_ends_that_link_alone(wide: Wide) -> None:
    (bad, to_bad), (good, to_good) = wide.join(), wide.join()
    bad.link._transport.send(bad.link._peer, [b"nonsense"])  # type: ignore[attr-defined]
    bad.link.send(Note("never heard"))
    good.link.send(Note("still here"))
    wide.until(lambda: to_bad.ends and len(to_good.said) == 2)
    to_bad.link.send(Note("to nobody"))
    to_good.link.send(Ping())
    wide.until(lambda: good.said)
    assert len(to_bad.ends) == 1
    assert to_bad.said == [Ping()]
    assert bad.said == []


def test_what_makes_no_sense_ends_an_agents_link(wide: Wide) -> None:
    agent, there = wide.join()
    assert isinstance(there.link, HubLink)
    wide.hub._transport.send(there.link._peer, [b"nonsense"])
    wide.hub._transport.send(there.link._peer, encode(Ping()))
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


def test_an_agent_talks_to_launch_py_alone(wide: Wide) -> None:
    """Somebody else listens there, who has not its secret key."""
    ticket = wide.hub.ticket
    other = Hub("127.0.0.1")
    heard: list[Any] = []
    with selectors.DefaultSelector() as selector:
        other.open(selector, heard.append)
        link = BackLink(AgentTicket(other.ticket.endpoint, ticket.server_key, ticket.public, ticket.secret))
        monitor = link._transport._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_DISCONNECTED
        )
        end = End(link, selector)
        link.send(Ping())
        assert monitor.poll(LONG * 1000), "not refused"
        link._transport._socket.disable_monitor()
        monitor.close()
        settle(selector)
        assert (heard, end.said) == ([], [])
        link.close()
        other.close()


def test_an_address_that_is_not_ours_makes_no_hub() -> None:
    from kvstore.errors import ConfigError

    with pytest.raises(ConfigError, match=r"cannot listen at tcp://198\.51\.100\.1:0"):
        Hub("198.51.100.1")
