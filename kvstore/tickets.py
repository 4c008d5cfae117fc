"""Outstanding requests: who has been asked what, and who waits for it. No sockets, no clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from kvstore.errors import KVStoreError
from kvstore.memory import Parts
from kvstore.spec import Key
from kvstore.wire import Buffer, Reply


class Waiter(Protocol):
    """Whoever can make tickets come true."""

    def wait(self, ticket: Ticket, timeout: float | None) -> None:
        """Return when ``ticket`` is done."""
        ...

    def poll(self) -> None:
        """Take in what has arrived."""
        ...


class Ticket:
    """A receipt for work that goes on: ``push`` returns one, and ``pull`` and ``pushpull`` with ``wait=False``.

    An error belongs to the ticket it happened to. It is raised by ``wait``, or else by the store's next call.
    """

    def __init__(
        self,
        what: str,
        keys: Sequence[Key] = (),
        waiter: Waiter | None = None,
        on_error: Callable[[Ticket], None] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self.what = what
        self.keys = list(keys)
        self.error: KVStoreError | None = None
        self.raised = False
        self.result: Any = None
        self.open: set[int] = set()
        self._waiter = waiter
        self._on_error = on_error
        self._timeout_s = timeout_s

    def done(self) -> bool:
        """Whether it has come true or failed; takes in what has arrived, and does not wait.

        Raises:
            KVStoreError: it has not, and will not, for the job has ended.
        """
        if self.open and self._waiter is not None:
            self._waiter.poll()
        return not self.open

    def wait(self, timeout: float | None = None) -> Any:
        """Wait until it has come true, for at most ``timeout`` seconds (the store's deadline by default).

        Raises:
            DeadlineExceeded: it has not; it may still, and ``wait`` may be called again.
            KVStoreError: it failed, here or on a server.
        """
        if self.open and self._waiter is not None:
            self._waiter.wait(self, self._timeout_s if timeout is None else timeout)
        if self.error is not None:
            self.raised = True
            raise self.error
        return self.result

    def take(self, reply: Any) -> None:
        """Make ``reply`` what ``wait`` returns; for requests that want the answer itself."""
        self.result = reply

    def fail(self, error: KVStoreError) -> None:
        """Note that part of the work failed; the first error stays."""
        if self.error is None:
            self.error = error
            if self._on_error is not None:
                self._on_error(self)

    def __repr__(self) -> str:
        state = "failed" if self.error else "waiting" if self.open else "done"
        return f"<Ticket {self} {state}>"

    def __str__(self) -> str:
        return f"{self.what} of {shorten(self.keys)}" if self.keys else self.what


def finish(ticket: Ticket, wait: bool) -> Ticket:
    """Wait for ``ticket`` if that is wanted; return it."""
    if wait:
        ticket.wait()
    return ticket


def shorten(keys: Iterable[Key], most: int = 8) -> str:
    """Render keys for a message: the first few, and how many more."""
    listed = list(keys)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(repr(key) for key in listed[:most]) + more


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
