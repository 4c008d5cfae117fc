"""A transport that a test plays, and a client over it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from kvstore import wire
from kvstore.member.client import Client
from kvstore.member.outstanding import Question
from kvstore.ticket import Operation, WaitLimits

WINDOW = 4 << 20
BARRIER = {"store": 0, "number": 0}
Answers = Callable[[bytes, wire.Request], "Sequence[wire.Message | list[bytes]]"]


class Played:
    """A transport whose peers answer at once with what ``answers`` says; while nothing comes, the clock moves."""

    def __init__(self, answers: Answers = lambda peer, request: []) -> None:
        self.answers = answers
        self.asked: list[tuple[bytes, wire.Request]] = []
        self.inbox: deque[tuple[bytes, list[Any]]] = deque()
        self.now = 0.0
        self.waits: list[float] = []
        self.closed = False

    def connect(self, endpoint: str, *, bulk: bool = False) -> bytes:
        return endpoint.encode()

    def disconnect(self, peer: bytes) -> None:
        """Nothing comes over it any more."""

    def send(self, peer: bytes, frames: Sequence[Any], priority: int | None = None) -> None:
        request = wire.decode(frames)
        self.asked.append((peer, request))
        for answer in self.answers(peer, request):
            self.arrive(peer, answer)

    def arrive(self, peer: bytes, message: wire.Message | list[bytes]) -> None:
        self.inbox.append((peer, message if isinstance(message, list) else wire.encode(message)))

    def recv(self, timeout: float) -> tuple[bytes, list[Any]] | None:
        if self.inbox:
            return self.inbox.popleft()
        if timeout > 0:
            self.waits.append(timeout)
            self.now += timeout
        return None

    def interrupt(self) -> None:
        pass

    def detach(self) -> None:
        pass

    def abandon(self) -> None:
        pass

    def close(self, linger: float = 0.0) -> None:
        self.closed = True

    def bind(self, endpoint: str) -> str:
        raise NotImplementedError


def client_of(transport: Any, timeout_s: float = 10.0, patience_s: float = 0.0) -> tuple[Client, bytes, bytes]:
    """A client with links to two servers, whose endpoints are their names."""
    limits = WaitLimits(timeout_s, patience_s)
    client = Client(lambda: transport, lambda: transport.now, limits, "worker", 77, WINDOW)
    return client, client.connect("server 0", "server 0"), client.connect("server 1", "server 1")


def over(transport: Any, **limits: float) -> tuple[Any, Client, bytes, bytes]:
    return transport, *client_of(transport, **limits)


def ask(client: Client, peer: bytes, operation: Operation, take: Callable[[Any], None] | None = None) -> None:
    client.ask(operation, Question(peer, operation, wire.Barrier, BARRIER, take))


def acknowledge(_peer: bytes, request: wire.Request) -> list[wire.Message]:
    return [wire.Ack(request.seq)]
