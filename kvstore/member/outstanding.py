"""Outstanding requests: who has been asked what, and who waits for it. No sockets, no clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvstore.errors import KVStoreError
from kvstore.memory import Parts
from kvstore.ticket import Ticket
from kvstore.wire import Buffer, Reply


class Sent(NamedTuple):
    """A request as it was sent; see ``Transport.send``."""

    frames: Sequence[Buffer | Parts]
    priority: int | None


@dataclass
class _Request:
    peer: bytes
    ticket: Ticket
    on_reply: Callable[[Any], None] | None
    sent: Sent | None = None


class Outstanding:
    """The requests that have not been answered, by sequence number."""

    def __init__(self) -> None:
        self._next = 1
        self._requests: dict[int, _Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def done(self) -> int:
        """Every request below this number has been answered."""
        return next(iter(self._requests), self._next)  # numbers grow, and dicts keep their order

    def add(self, peer: bytes, ticket: Ticket, on_reply: Callable[[Any], None] | None) -> int:
        """Note a request to ``peer`` on behalf of ``ticket``; return its sequence number."""
        seq = self._next
        self._next += 1
        self._requests[seq] = _Request(peer, ticket, on_reply)
        ticket.open.add(seq)
        return seq

    def withdraw(self, seq: int) -> None:
        """Forget a request that could not be sent."""
        self._requests.pop(seq).ticket.open.discard(seq)

    def sent(self, seq: int, sent: Sent) -> None:
        """Keep what a request was sent as, to send it again."""
        self._requests[seq].sent = sent

    def again(self, peer: bytes) -> list[Sent]:
        """Return what has been sent to ``peer`` and not answered, in order."""
        return [its.sent for its in self._requests.values() if its.peer == peer and its.sent is not None]

    def detach(self) -> None:
        """Keep nothing that lies in callers' arrays: those may change."""
        for request in self._requests.values():
            if request.sent is not None and any(isinstance(frame, Parts) for frame in request.sent.frames):
                request.sent = None

    def settle(self, peer: bytes, reply: Reply, error: KVStoreError | None) -> None:
        """Match ``reply`` with its request; a repeat, or a stranger's answer, matches none and is dropped."""
        request = self._requests.get(reply.seq)
        if request is None or request.peer != peer:
            return
        del self._requests[reply.seq]
        ticket = request.ticket
        if error is None and request.on_reply is not None:
            try:
                request.on_reply(reply)
            except KVStoreError as exc:
                error = exc
            except Exception as exc:  # it is the ticket's, not that of the thread that happened to receive the answer
                error = KVStoreError(f"the answer could not be taken: {type(exc).__name__}: {exc}")
                error.__cause__ = exc
        if error is not None:
            ticket.fail(error)
        ticket.open.discard(reply.seq)  # last: from here on another thread may take the ticket for done

    def of(self, ticket: Ticket) -> dict[int, bytes]:
        """Return the unanswered requests of ``ticket``: sequence number to peer."""
        return {seq: self._requests[seq].peer for seq in sorted(ticket.open) if seq in self._requests}
