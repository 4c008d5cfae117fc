"""A ticket: the receipt for work that goes on, which tells whether it is done and raises what has gone wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from kvstore.errors import KVStoreError, again
from kvstore.spec import Key, shorten


class Limits(NamedTuple):
    """How long a wait may take, in seconds.

    Attributes:
        answer_s: a peer may take so long to answer, or at least to say what it waits for itself.
        patience_s: as long as all of them do, a wait goes on until then.
    """

    answer_s: float
    patience_s: float


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
        limits: Limits | None = None,
    ) -> None:
        self.what = what
        self.keys = list(keys)
        self.error: KVStoreError | None = None
        self.raised = False
        self.result: Any = None
        self.open: set[int] = set()
        self.limits = limits
        self._waiter = waiter
        self._on_error = on_error

    def done(self) -> bool:
        """Whether it has come true or failed; takes in what has arrived, and does not wait.

        Raises:
            KVStoreError: it has not, and will not, for the job has ended.
        """
        if self.open and self._waiter is not None:
            self._waiter.poll()
        return not self.open

    def wait(self, timeout: float | None = None) -> Any:
        """Wait until it has come true, for at most ``timeout`` seconds; by default as long as the store does.

        Raises:
            DeadlineExceeded: it has not; it may still, and ``wait`` may be called again.
            KVStoreError: it failed, here or on a server.
        """
        if self.open and self._waiter is not None:
            self._waiter.wait(self, timeout)
        if self.error is not None:
            self.raised = True
            raise again(self.error)
        return self.result

    def take(self, reply: Any) -> None:
        """Make ``reply`` what ``wait`` returns; for requests that want the answer itself."""
        self.result = reply

    def fail(self, error: KVStoreError) -> None:
        """Note that part of the work failed; the first error stays. May be called again."""
        if self._on_error is not None:
            self._on_error(self)
        if self.error is None:
            self.error = error

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
