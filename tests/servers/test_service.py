"""The loop around a core: what it does with messages, bad ones, errors, time and posted work."""

from __future__ import annotations

import logging
from collections import deque
from typing import Any

import pytest

from kvstore import wire
from kvstore.errors import WireError
from servers.service import Service


class Links:
    """A transport that plays a script: messages, or silence that takes as long as was asked for."""

    def __init__(self, *script: Any) -> None:
        self.script = deque(script)
        self.now = 0.0
        self.sent: list[tuple[bytes, wire.Message]] = []
        self.rings = 0
        self.refused: list[bytes] = []

    def recv(self, timeout: float) -> Any:
        if not self.script:
            self.service.stop()  # type: ignore[attr-defined]
            return None
        step = self.script.popleft()
        if callable(step):
            step()
            return None
        if step is None:
            self.now += timeout
            return None
        return step if isinstance(step, tuple) else (b"peer", step)

    def send(self, peer: bytes, frames: Any, priority: int | None = None) -> None:
        self.sent.append((peer, wire.decode(frames)))

    def refuse(self, peer: bytes) -> None:
        self.refused.append(peer)

    def interrupt(self) -> None:
        self.rings += 1


def serve(links: Links, handle: Any = lambda peer, message: [], tick: Any = list, interval_s: float = 1.0) -> Service:
    service = Service(links, interval_s, lambda: links.now)  # type: ignore[arg-type]
    links.service = service  # type: ignore[attr-defined]
    service.run(handle, tick)
    return service


def test_what_the_core_decides_is_sent():
    links = Links((b"a", wire.encode(wire.Ack(1))), (b"b", wire.encode(wire.Ack(2))))
    serve(links, lambda peer, message: [(peer, message), (b"c", wire.Ack(message.seq + 10))])
    assert links.sent == [(b"a", wire.Ack(1)), (b"c", wire.Ack(11)), (b"b", wire.Ack(2)), (b"c", wire.Ack(12))]


def test_what_many_are_told_is_encoded_once(monkeypatch: pytest.MonkeyPatch):
    encoded: list[wire.Message] = []
    encode = wire.encode
    links = Links((b"a", encode(wire.Ack(1))))
    monkeypatch.setattr(wire, "encode", lambda message: [encoded.append(message), encode(message)][1])
    one, same, other = wire.Ack(2), wire.Ack(2), wire.Ack(3)
    serve(links, lambda *_: [(b"b", one), (b"c", one), (b"d", other), (b"e", one), (b"f", same)])
    assert links.sent == [(b"b", one), (b"c", one), (b"d", other), (b"e", one), (b"f", one)]
    assert encoded == [one, other, one, same]


def test_time_is_told_at_the_interval_when_no_message_waits():
    ticks: list[float] = []
    message = wire.encode(wire.Ack(1))
    links = Links(None, None, message, message, message, None, None)

    def tick() -> list[Any]:
        ticks.append(links.now)
        return [(b"x", wire.Ack(len(ticks)))]

    serve(links, tick=tick, interval_s=2.0)
    assert ticks == [0.0, 2.0, 4.0, 6.0]
    assert [reply for _, reply in links.sent] == [wire.Ack(n) for n in range(1, 5)]


def test_while_messages_wait_time_is_told_later_but_told():
    """What waits in the queue should be read before anybody is found overdue, but a flood must not stop the clock."""
    ticks: list[float] = []
    links = Links(None, *[wire.encode(wire.Ack(n)) for n in range(1, 5)], None)

    def handle(peer: bytes, message: wire.Message) -> list[Any]:
        links.now += 0.75
        return []

    serve(links, handle, lambda: ticks.append(links.now) or [])
    assert ticks == [0.0, 2.25, 3.25]


def test_what_is_done_for_readers_is_done_at_once_when_it_is_due():
    class Pace:
        done = 0

        def due(self) -> float:
            links.now += 1e-5  # looking takes a moment, too
            return links.now

        def do(self) -> list[Any]:
            self.done += 1
            return []

    links, pace, waits = Links(None, None, None), Pace(), []
    receive = links.recv
    links.recv = lambda timeout: [waits.append(timeout), receive(timeout)][1]  # type: ignore[method-assign]
    service = Service(links, 1.0, lambda: links.now)  # type: ignore[arg-type]
    links.service = service  # type: ignore[attr-defined]
    service.run(lambda *_: [], between=pace)  # type: ignore[arg-type]
    assert (waits, pace.done >= 3) == ([0.0] * 4, True)


def test_bad_messages_cost_their_links_and_a_flood_does_not_fill_the_log(caplog: pytest.LogCaptureFixture):
    handled = []
    links = Links(*([[b"\xc1 nonsense"]] * 1234), wire.encode(wire.Ack(1)))
    serve(links, lambda peer, message: handled.append(message) or [])
    assert handled == [wire.Ack(1)]
    assert links.refused == [b"peer"] * 1234
    assert [record.args[1] for record in caplog.records] == [1, 10, 100, 1000]  # type: ignore[index]


def test_a_message_that_the_core_finds_bad_is_no_better(caplog: pytest.LogCaptureFixture):
    def handle(peer: bytes, message: wire.Message) -> list[Any]:
        raise WireError("no such thing")

    links = Links(wire.encode(wire.Ack(1)))
    serve(links, handle)
    assert "dropped a bad message (1 so far): no such thing" in caplog.text
    assert links.refused == [b"peer"]


@pytest.mark.parametrize("where", ["handle", "decode"])
def test_an_error_costs_one_message_and_is_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, where: str
):
    def handle(peer: bytes, message: Any) -> list[Any]:
        if message.seq == 1 and where == "handle":
            raise ZeroDivisionError
        return [(peer, message)]

    decode = wire.decode

    def broken(frames: Any) -> wire.Message:
        message = decode(frames)
        if message == wire.Ack(1) and where == "decode":
            raise RecursionError
        return message

    monkeypatch.setattr(wire, "decode", broken)
    links = Links(wire.encode(wire.Ack(1)), wire.encode(wire.Ack(2)))
    serve(links, handle)
    assert links.sent == [(b"peer", wire.Ack(2))]
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert "could not be handled" in caplog.text


def test_posted_work_runs_in_the_loop_and_rings():
    links = Links(lambda: links.service.post(lambda: [(b"x", wire.Ack(7))]), None)  # type: ignore[attr-defined]
    serve(links)
    assert links.sent == [(b"x", wire.Ack(7))]
    assert links.rings >= 1


def test_what_was_posted_before_it_runs_is_done():
    links = Links(None)
    service = Service(links, 1.0, lambda: links.now)  # type: ignore[arg-type]
    links.service = service  # type: ignore[attr-defined]
    service.post(lambda: [(b"x", wire.Ack(7))])
    service.run(lambda peer, message: [])
    assert links.sent == [(b"x", wire.Ack(7))]


def test_the_message_that_stops_it_is_still_answered():
    links = Links(wire.encode(wire.Ack(1)), wire.encode(wire.Ack(2)))

    def handle(peer: bytes, message: wire.Message) -> list[Any]:
        links.service.stop()  # type: ignore[attr-defined]
        return [(peer, message)]

    serve(links, handle)
    assert links.sent == [(b"peer", wire.Ack(1))]


class Grown:
    """Tables with so many pieces of work, each of which is to wait so long."""

    def __init__(self, pieces: int, patience_s: float = 0.001) -> None:
        self.pieces, self.patience_s = pieces, patience_s
        self.at: list[float] = []

    def __bool__(self) -> bool:
        return bool(self.pieces)

    def work(self) -> None:
        self.pieces -= 1
        self.at.append(self.links.now)  # type: ignore[attr-defined]


@pytest.mark.parametrize("patience_s", [0.001, 0.02])
def test_tables_have_work_done_for_them_once_no_message_has_come_for_a_while(patience_s: float):
    grown, message = Grown(0, patience_s), (b"a", wire.encode(wire.Ack(1)))

    def handle(*_: Any) -> list[Any]:
        grown.pieces = 3
        return []

    links = Links(message, message, None, None, None, message, None, None, None, None, None)
    service = Service(links, 1.0, lambda: links.now)  # type: ignore[arg-type]
    grown.links = links  # type: ignore[attr-defined]
    links.service = service  # type: ignore[attr-defined]
    service.grown = grown  # type: ignore[assignment]
    service.run(handle)
    assert links.now >= 1.0, "then it waits as long as ever"
    assert grown.at == [patience_s] * 2 + [2 * patience_s] * 3, "a message that comes waits for one piece only"
