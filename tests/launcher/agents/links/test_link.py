"""Links over pipes."""

from __future__ import annotations

import contextlib
import itertools
import os
import selectors
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from junk import JUNK, mutated
from link_ends import End, settle, turn

from kvstore import wire
from kvstore.errors import ConfigError, WireError
from kvstore.job.curve_keys import pair
from launcher.agents.links import protocol as p
from launcher.agents.links.link import (
    ENLIST,
    MAGIC,
    MAX_FRAMES,
    MAX_MESSAGE,
    MAX_PREAMBLE,
    AgentTicket,
    PipeLink,
    Unframer,
    frame,
)
from launcher.agents.links.protocol import Bye, Note, Output, Ping, Pong

PIECE = 1 << 16


MANY = 40  # pieces: more than are acknowledged at a time, and than a pipe holds


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
    """launch.py's end alone, which writes to ``own``; what the other says, and hears, are bytes."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        (read, self.target), (self.source, self.own) = os.pipe(), os.pipe()
        self.link = PipeLink(read, self.own)
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
    os.write(half.target, MAGIC + frame(wire.encode(Note("why"))))
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
    os.write(half.target, MAGIC + frame(wire.encode(Ping())))
    settle(selector)
    assert half.end.said == [Ping()]
    assert half.link.preamble == ""


@pytest.mark.parametrize(
    ("data", "how"),
    [
        (MAGIC + bytes(4), "a message has 0 frames"),
        (MAGIC + frame([b"\xff"]), "a header that is a list"),
        (MAGIC + frame([b"", b""]), "the header is not msgpack"),
    ],
)
def test_garbage_ends_a_link(half: Half, selector: selectors.BaseSelector, data: bytes, how: str) -> None:
    os.write(half.target, data + frame(wire.encode(Ping())))
    settle(selector)
    assert half.end.said == []
    assert len(half.end.ends) == 1
    assert how in half.end.ends[0]


def test_nothing_comes_after_the_close(selector: selectors.BaseSelector) -> None:
    (read, target), (source, write) = os.pipe(), os.pipe()
    link, said = PipeLink(read, write), []

    def leave(message: wire.Message) -> None:
        said.append(message)
        link.close()

    link.open(selector, leave, pytest.fail)
    os.write(target, MAGIC + frame(wire.encode(Bye())) + frame(wire.encode(Ping())))
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
        os.dup2(full.fileno(), half.own)
    half.link.send(Ping())
    assert half.end.ends == ["No space left on device"]


MESSAGES = st.lists(st.lists(st.binary(max_size=40), min_size=1, max_size=MAX_FRAMES), max_size=6)
NOISE = st.binary(max_size=60).filter(lambda noise: MAGIC not in noise + MAGIC[:-1])


def begun() -> Unframer:
    unframer = Unframer()
    unframer.feed(MAGIC)
    return unframer


@given(MESSAGES, NOISE, st.lists(st.integers(0, 400)))
def test_any_messages_in_any_pieces_behind_any_banner(
    messages: list[list[bytes]], noise: bytes, cuts: list[int]
) -> None:
    stream = noise + MAGIC + b"".join(map(frame, messages))
    unframer = Unframer()
    found = []
    edges = [0, *sorted(cuts), len(stream)]
    for start, end in itertools.pairwise(edges):
        found += unframer.feed(stream[start:end])
    assert found == messages
    assert unframer.preamble == ""


@given(st.binary(max_size=200))
def test_whatever_comes_is_messages_or_an_error(data: bytes) -> None:
    unframer = begun()
    try:
        messages = unframer.feed(data)
    except WireError:
        return
    assert all(1 <= len(message) <= MAX_FRAMES for message in messages)


def test_what_is_said_instead_of_a_message_can_be_shown() -> None:
    unframer = Unframer()
    assert unframer.feed(b"Welcome to n\xffde1!\n\0kvstore") == []
    assert unframer.preamble == "Welcome to n\N{REPLACEMENT CHARACTER}de1!\n\0kvstore"
    assert unframer.feed(b" agent 1\n") == []
    assert unframer.preamble == ""


def test_who_talks_without_end_is_no_agent() -> None:
    unframer = Unframer()
    assert unframer.feed(bytes(MAX_PREAMBLE)) == []
    with pytest.raises(WireError, match="expected an agent, got a flood of other output"):
        unframer.feed(b"x")


@pytest.mark.parametrize("count", [0, MAX_FRAMES + 1, 2**32 - 1])
def test_too_many_frames_or_none(count: int) -> None:
    with pytest.raises(WireError, match=f"a message has {count} frames"):
        begun().feed(struct.pack("!I", count))


@pytest.mark.parametrize("lengths", [[MAX_MESSAGE + 1], [MAX_MESSAGE, 1], [2**32 - 1] * 4])
def test_a_message_that_is_too_large_is_refused_before_it_comes(lengths: list[int]) -> None:
    unframer = begun()
    assert unframer.feed(struct.pack(f"!{len(lengths)}I", len(lengths), *lengths[:-1])) == []
    with pytest.raises(WireError, match=f"a message has {sum(lengths)} bytes"):
        unframer.feed(struct.pack("!I", lengths[-1]))


def test_good_messages_before_a_bad_one_are_lost_with_the_stream() -> None:
    with pytest.raises(WireError, match="0 frames"):
        begun().feed(frame([b"a"]) + bytes(4))


KEY = "k" * 40


def test_a_ticket_arrives_and_shows_no_secret() -> None:
    (server, _), (public, secret) = pair(), pair()
    ticket = AgentTicket("tcp://[fd00::1]:5555", server, public, secret)
    assert AgentTicket.parse(ticket.text) == ticket
    assert AgentTicket.parse(f"  {ticket.text}\n") == ticket
    assert secret not in repr(ticket)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hunter2",
        f"tcp://h:1 {KEY} {KEY}",
        f"tcp://h:1 {KEY} {KEY} hunter2",
        f"tcp://h:1 {KEY} {KEY} {KEY} hunter2",
        f"ipc://h {KEY} {KEY} {KEY}",
    ],
)
def test_what_is_no_ticket_is_not_shown(text: str) -> None:
    with pytest.raises(ConfigError, match=ENLIST) as caught:
        AgentTicket.parse(text)
    assert "hunter2" not in str(caught.value)


EXAMPLES = settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
PATH = b"/t\xff"
TASK = [0, "worker", 0, 1, [b"A", b"1"]]
START = p.StartTasks("mark", PATH, [b"python", b"x\xff.py"], [b"server"], 10.0, 2, [TASK, [4096, "server", 1, 2, []]])
GOOD: list[Any] = [
    p.Hello("0.1.0", "3.11", "node1", -1, "10.0.0.1"),
    p.Survey("eth0", "10.0.0.1", PATH, True, [b"python", b"train.py"]),
    p.Surveyed("10.0.0.2", "it leads there", False, 9000, ""),
    p.Probe([["this machine", "10.0.0.1", 9001]]),
    p.Probed([["node1", "connection refused"]]),
    START,
    p.Started(),
    p.Refused("no such command", 127),
    p.Output(3, 2, [b"line\n\xff", b""]),
    p.Exited(3, 0, 9),
    p.Reported(3, "ValueError: no", "train.py:3", "Traceback", True, False, "start 2 of server 0"),
    p.Empty(),
    p.Note("ünï"),
    p.StartAgain(3, [b"A", b"1"]),
    p.Signal(15),
    p.SignalTask(3, 19),
    p.Ping(),
    p.Pong(),
    p.Bye("it was sent SIGTERM"),
    p.OutputAck(2**40),
]
CODES = {cls: code for code, cls in wire.coding.MESSAGES.items() if cls.__module__ == p.__name__}


def raw(cls: type[Any], *values: Any, buffers: Sequence[bytes] = ()) -> list[bytes]:
    return [msgpack.packb([wire.VERSION, CODES[cls], *values], unicode_errors="surrogateescape"), *buffers]


def test_every_message_is_here() -> None:
    assert {type(message) for message in GOOD} == set(CODES)


@pytest.mark.parametrize("message", GOOD, ids=lambda message: type(message).__name__)
def test_a_message_arrives_as_it_was_sent(message: Any) -> None:
    assert wire.decode([bytes(part) for part in wire.encode(message)]) == message


@pytest.mark.parametrize("message", GOOD, ids=lambda message: type(message).__name__)
def test_no_field_takes_just_anything(message: Any) -> None:
    cls = type(message)
    names = wire.coding.field_names(cls)
    values = [getattr(message, name) for name in names]
    buffers = getattr(message, "buffers", [])
    for position in range(len(values)):
        for wrong in (None, {}, [[[[]]]], "x" * 70000, b"x" * (p.MAX_BYTES + 1), [None], float("nan")):
            parts = raw(cls, *values[:position], wrong, *values[position + 1 :], buffers=buffers)
            with pytest.raises(WireError, match=f"{cls.__name__}.{names[position]}: expected"):
                wire.decode(parts)
    for fewer in range(len(values)):
        with pytest.raises(WireError, match=f"{cls.__name__} has {len(values)} fields"):
            wire.decode(raw(cls, *values[:fewer], buffers=buffers))
    with pytest.raises(WireError, match=f"has {len(values)} fields, got {len(values) + 1}"):
        wire.decode(raw(cls, *values, 1))
    if "buffers" not in cls.__dataclass_fields__:
        with pytest.raises(WireError, match="has no buffers, got 1"):
            wire.decode(raw(cls, *values, buffers=[b""]))


@pytest.mark.parametrize(
    "parts",
    [
        raw(p.Output, 0, 3, buffers=[b"x"]),
        raw(p.Output, p.MAX_TASKS + 1, 1, buffers=[b"x"]),
        raw(p.Exited, 0, 256, 0),
        raw(p.Exited, 0, 0, 129),
        raw(p.Exited, 0, True, 0),
        raw(p.Signal, 0),
        raw(p.Signal, 65),
        raw(p.OutputAck, -1),
        raw(p.Refused, "x", -1),
        raw(p.Hello, "v", "p", "h" * 513, 0, ""),
        raw(p.Hello, "v", "p", "h", -2, ""),
        raw(p.Probe, [["name", "address", 0]]),
        raw(p.Probe, [["name", "address", 70000]]),
        raw(p.Probe, [["name", "address"]]),
        raw(p.Surveyed, "", "", 1, 0, ""),
        raw(p.Surveyed, "", "", False, 65536, ""),
        raw(p.StartTasks, "m", b"", [], [], 1.0, 0, [[0, "scheduler", 0, 1, []]]),
        raw(p.StartTasks, "m", b"", [], [], 1.0, 0, [[0, "worker", 0, 0, []]]),
        raw(p.StartTasks, "m", b"", [], [], 1.0, 0, [[0, "worker", 0, 1, ["text"]]]),
        raw(p.StartTasks, "m", "text", [], [], 1.0, 0, []),
        raw(p.StartTasks, "m", b"", [], [], float("inf"), 0, []),
        raw(p.StartTasks, "m", b"", [], [], 1.0, 1025, []),
        raw(p.Note, "\udcff"),
    ],
)
def test_what_is_out_of_bounds(parts: list[bytes]) -> None:
    with pytest.raises(WireError):
        wire.decode(parts)


@st.composite
def _odd_fields(draw: st.DrawFn) -> list[bytes]:
    """One of our messages, some of whose fields make no sense."""
    good = draw(st.sampled_from(GOOD))
    junk = draw(st.sets(st.integers(0, 6), min_size=1))
    values = [getattr(good, name) for name in wire.coding.field_names(type(good))]
    values = [draw(JUNK) if position in junk else value for position, value in enumerate(values)]
    return raw(type(good), *values, buffers=draw(st.lists(st.binary(max_size=9), max_size=2)))


_broken = mutated(st.sampled_from(GOOD).map(wire.encode))


@EXAMPLES
@given(st.lists(st.binary(max_size=40), max_size=4) | _odd_fields() | _broken)
def test_whatever_comes_is_a_message_that_could_have_been_sent_or_an_error(parts: list[bytes]) -> None:
    try:
        message = wire.decode(parts)
    except WireError:
        return
    assert wire.decode([bytes(part) for part in wire.encode(message)]) == message or message != message  # NaN
    if isinstance(message, p.StartTasks):
        for *_, flat in message.tasks:
            with contextlib.suppress(WireError):
                p.unpack(flat)


NAMES = st.binary(min_size=1, max_size=9).filter(lambda name: not {0, ord("=")}.intersection(name)).map(os.fsdecode)
VALUES = st.binary(max_size=20).filter(lambda value: 0 not in value).map(os.fsdecode)


@given(st.dictionaries(NAMES, VALUES))
def test_an_environment_of_any_bytes_arrives(variables: dict[str, str]) -> None:
    start = p.StartTasks("m", b"", [], [], 1.0, 0, [[0, "worker", 0, 1, p.pack(variables)]])
    assert p.unpack(wire.decode(wire.encode(start)).tasks[0][4]) == variables


@pytest.mark.parametrize("flat", [[b"A"], [b"", b"x"], [b"A=B", b"x"], [b"A\0", b"x"], [b"A", b"x\0y"]])
def test_what_is_no_environment(flat: list[bytes]) -> None:
    with pytest.raises(WireError, match="expected pairs of a variable and its value"):
        p.unpack(flat)
