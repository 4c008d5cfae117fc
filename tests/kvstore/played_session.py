"""A session whose scheduler and servers are functions: they answer at once, and what they were asked is kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from kvstore import wire
from kvstore.job.config import Config
from kvstore.member.outstanding import PendingRequest
from kvstore.ticket import Operation, WaitLimits
from kvstore.transport.memory import Heap

SCHEDULER = b"scheduler"
AGGREGATOR = b"aggregator 0"


class PlayedSession:
    """See the module.

    Args:
        answer: returns the reply to a request of a peer; None leaves it without one, and by default it is ``Ack``.

    Attributes:
        asked: every message, and whom it was for.
    """

    def __init__(
        self,
        servers: int = 2,
        answer: Callable[[bytes, wire.Request], wire.Reply | None] = lambda _, request: wire.Ack(request.seq),
        aggregator: bool = False,
    ) -> None:
        self.scheduler = SCHEDULER
        self.leads, self.newcomer, self.gives = True, False, True
        self.servers = [b"server %d" % rank for rank in range(servers)]
        self.aggregator = AGGREGATOR if aggregator else None
        self.client = _PlayedClient(self._answer)
        self.asked: list[tuple[bytes, Any]] = []
        self.config = Config()
        self.limits = WaitLimits(1.0, 1.0)
        self.num_workers, self.rank, self.stores = 2, 0, 0
        self.store_names: dict[int, str] = {}
        self.takeovers = 0
        self.tracer = None
        self.flushes: list[Callable[[float], None]] = []
        self.activity: Any = SimpleNamespace(stores=[])
        self._reply = answer

    def carrier(self, server: int) -> bytes:
        return self.servers[server] if self.aggregator is None else self.aggregator

    def check(self, store: int) -> None: ...

    def _answer(self, peer: bytes, request: wire.Request) -> wire.Reply | None:
        self.asked.append((peer, request))
        if type(request).__name__ == "OpenStore":
            return wire.StoreOpened(request.seq, 7)
        return self._reply(peer, request)


class _PlayedClient(Heap):
    """See the module.

    Attributes:
        made: the requests.
        over: see ``Client``.
    """

    def __init__(self, answer: Callable[[bytes, Any], wire.Reply | None]) -> None:
        self.made: list[PendingRequest] = []
        self.over = False
        self._answer = answer
        self._seq = 0

    def exchange(self, operation: Operation, prepare: Callable[..., Any], *args: Any) -> Any:
        self.submit(operation, prepare, *args)
        assert not operation.open
        return operation.result

    def submit(self, operation: Operation, prepare: Callable[..., Any], *args: Any) -> None:
        requests: Sequence[PendingRequest]
        requests, effect = prepare(operation, *args)
        for request in requests:
            self._seq += 1
            request.seq = self._seq
            operation.open.add(request.seq)
        if effect is not None:
            effect()
        self.made += requests
        for request in requests:
            message: wire.Message = request.message(wire.Sender(wire.Node("worker", 0, 1), request.seq, 1))
            reply = self._answer(request.peer, message)
            if reply is not None:
                follows = request.take(reply)
                if follows is not None:
                    follows()
                operation.open.discard(request.seq)

    def wait(self, operation: Operation, timeout: float | None) -> None:
        assert not operation.open

    def wait_all(self, operations: Sequence[Operation], timeout: float | None) -> None:
        assert not any(operation.open for operation in operations)

    def alone(self, action: Callable[..., Any], *args: Any) -> Any:
        return action(*args)

    def gathers(self, peer: bytes) -> bool:
        return False

    def of(self, kind: type) -> list[Any]:
        return []

    def poll(self) -> None: ...
