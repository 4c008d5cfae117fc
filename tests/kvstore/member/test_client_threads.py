"""Several threads of one client: one at a time is in the transport, and nobody waits for another in vain."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

from played import ask, client_of

from kvstore import wire
from kvstore.errors import KVStoreError, NodeLost, UsageError
from kvstore.member.client import Client
from kvstore.ticket import Operation


class Gate:
    """A transport that blocks in ``recv`` until a message or an interrupt comes, and tells what it is doing."""

    def __init__(self) -> None:
        self.now = 0.0
        self.changed = threading.Condition()
        self.inbox: deque[tuple[bytes, list[Any]]] = deque()
        self.rung = False
        self.waiting = threading.Event()
        self.sent: deque[tuple[bytes, wire.Request]] = deque()
        self.inside = 0

    def connect(self, endpoint: str, *, bulk: bool = False) -> bytes:
        return endpoint.encode()

    def send(self, peer: bytes, frames: Sequence[Any], priority: int | None = None) -> None:
        self._enter()
        self.sent.append((peer, wire.decode(frames)))
        self.inside -= 1

    def recv(self, timeout: float) -> tuple[bytes, list[Any]] | None:
        self._enter()
        try:
            with self.changed:
                if timeout > 0 and not self.inbox and not self.rung:
                    self.waiting.set()
                    self.changed.wait_for(lambda: self.inbox or self.rung, 20)  # far longer than was asked for
                    self.waiting.clear()
                self.rung = False if timeout > 0 else self.rung
                return self.inbox.popleft() if self.inbox else None
        finally:
            self.inside -= 1

    def arrive(self, peer: bytes, message: wire.Message) -> None:
        with self.changed:
            self.inbox.append((peer, wire.encode(message)))
            self.changed.notify()

    def interrupt(self) -> None:
        with self.changed:
            self.rung = True
            self.changed.notify()

    def _enter(self) -> None:
        assert not self.inside, "two threads are in the transport"
        self.inside += 1


class Waiting(threading.Thread):
    """Waits for an operation; ``outcome`` is what came of it."""

    def __init__(self, operation: Operation) -> None:
        super().__init__(daemon=True)
        self.operation, self.outcome = operation, None
        self.start()

    def run(self) -> None:
        try:
            self.outcome = self.operation.wait(1000.0)
        except KVStoreError as exc:
            self.outcome = exc

    def end(self) -> Any:
        self.join(10)
        assert not self.is_alive(), "it still waits"
        return self.outcome


def asked(client: Client, peer: bytes) -> Operation:
    operation = Operation("x", (), client)
    ask(client, peer, operation, operation.take)
    return operation


def test_a_sender_does_not_wait_for_one_who_waits():
    gate = Gate()
    client, a, b = client_of(gate)
    waiting = Waiting(asked(client, a))
    for _ in range(5):
        assert gate.waiting.wait(10)
        before = len(gate.sent)
        asked(client, b)  # would take 20 s, were the other not interrupted
        assert len(gate.sent) == before + 1
    gate.arrive(a, wire.Ack(1))
    assert waiting.end() == wire.Ack(1)


def test_two_who_wait_both_get_theirs_in_either_order():
    for order in ((1, 2), (2, 1)):
        gate = Gate()
        client, a, b = client_of(gate)
        both = {1: Waiting(asked(client, a)), 2: Waiting(asked(client, b))}
        for seq in order:
            assert gate.waiting.wait(10)
            gate.arrive({1: a, 2: b}[seq], wire.Ack(seq))
            assert both[seq].end() == wire.Ack(seq)


def test_what_one_thread_takes_in_wakes_the_other():
    gate = Gate()
    client, a, b = client_of(gate)
    first = Waiting(asked(client, a))
    assert gate.waiting.wait(10)
    second = Waiting(asked(client, b))
    with gate.changed:  # both answers at once: whoever is at the transport takes both
        gate.inbox.extend([(b, wire.encode(wire.Ack(2))), (a, wire.encode(wire.Ack(1)))])
        gate.changed.notify()
    assert (first.end(), second.end()) == (wire.Ack(1), wire.Ack(2))


def test_a_failure_wakes_all_who_wait():
    gate = Gate()
    client, a, b = client_of(gate)
    both = [Waiting(asked(client, peer)) for peer in (a, b)]
    assert gate.waiting.wait(10)
    client.fail(NodeLost("over"))
    assert [str(waiting.end()) for waiting in both] == ["over", "over"]


def test_closing_wakes_all_who_wait():
    gate = Gate()
    gate.close = lambda linger: None  # type: ignore[attr-defined]
    client, a, b = client_of(gate)
    both = [Waiting(asked(client, peer)) for peer in (a, b)]
    assert gate.waiting.wait(10)
    client.close()
    assert [type(waiting.end()) for waiting in both] == [UsageError, UsageError]


def test_polling_does_not_wait_for_one_who_waits():
    gate = Gate()
    client, a, b = client_of(gate)
    other = asked(client, b)
    waiting = Waiting(asked(client, a))
    assert gate.waiting.wait(10)
    assert not other.done()
    gate.arrive(b, wire.Ack(1))
    gate.arrive(a, wire.Ack(2))
    assert waiting.end() == wire.Ack(2)
    assert other.done()
