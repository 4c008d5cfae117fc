"""What launch.py and its agents say to each other, and what they refuse to hear."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from junk import JUNK

from kvstore import wire
from kvstore.errors import WireError
from launcher.agents.links import protocol as p

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
CODES = {cls: code for code, cls in wire.frames.MESSAGES.items() if cls.__module__ == p.__name__}


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
    names = wire.frames.field_names(cls)
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
    values = [getattr(good, name) for name in wire.frames.field_names(type(good))]
    values = [draw(JUNK) if position in junk else value for position, value in enumerate(values)]
    return raw(type(good), *values, buffers=draw(st.lists(st.binary(max_size=9), max_size=2)))


@st.composite
def _mutated(draw: st.DrawFn) -> list[bytes]:
    """A good message with bytes changed, left out or added."""
    parts = [bytearray(part) for part in wire.encode(draw(st.sampled_from(GOOD)))]
    for _ in range(draw(st.integers(1, 3))):
        part = parts[draw(st.integers(0, len(parts) - 1))]
        at = draw(st.integers(0, max(0, len(part) - 1)))
        what = draw(st.integers(0, 2))
        if what == 0 and part:
            part[at] = draw(st.integers(0, 255))
        elif what == 1:
            del part[at:]
        else:
            part[at:at] = draw(st.binary(min_size=1, max_size=4))
    return [bytes(part) for part in parts]


@EXAMPLES
@given(st.lists(st.binary(max_size=40), max_size=4) | _odd_fields() | _mutated())
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
