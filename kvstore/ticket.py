"""Operations, calls of a store that may go on when they have returned, and tickets, which their callers hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

from kvstore.dynamo import outside_graphs
from kvstore.errors import KVStoreError, again
from kvstore.spec import Key, shorten

# Why the calls of a block are made, for errors and for other workers that they leave waiting.
because: ContextVar[str] = ContextVar("because", default="")


@contextmanager
def explained(why: str) -> Iterator[None]:
    token = because.set(f" ({why})")
    try:
        yield
    finally:
        because.reset(token)


class WaitLimits(NamedTuple):
    """How long a wait may take."""

    answer_s: float  # how long a peer may take to answer, or to report what it is waiting for, in seconds
    patience_s: float  # how long a wait goes on while all peers do so, in seconds


class Waiter(Protocol):
    """Completes operations."""

    def wait(self, operation: Operation, timeout: float | None) -> None: ...

    def poll(self) -> None: ...


class Operation:
    """A call of a store, from its first request to the last answer. Its caller holds a ``Ticket`` for it.

    Args:
        on_error: called with this operation whenever a part of it fails.

    Attributes:
        open: the numbers of its requests that have not been answered.
        raised: whether the error has been raised in the caller's thread.
    """

    def __init__(
        self,
        what: str,
        keys: Sequence[Key] = (),
        waiter: Waiter | None = None,
        on_error: Callable[[Operation], None] | None = None,
        limits: WaitLimits | None = None,
    ) -> None:
        self.what = what
        self.keys = list(keys)
        self._because = because.get()
        self.error: KVStoreError | None = None
        self.raised = False
        self.result: Any = None
        self.open: set[int] = set()
        self.limits = limits
        self._waiter = waiter
        self._on_error = on_error

    def done(self) -> bool:
        if self.open and self._waiter is not None:
            self._waiter.poll()
        return not self.open

    def wait(self, timeout: float | None = None) -> Any:
        if self.open and self._waiter is not None:
            self._waiter.wait(self, timeout)
        if self.error is not None:
            self.raised = True
            raise again(self.error)
        return self.result

    def take(self, reply: Any) -> None:
        """Make ``reply`` the result, for requests whose caller wants the answer itself."""
        self.result = reply

    def fail(self, error: KVStoreError) -> None:
        """Note that a part has failed. May be called again; the first error stays."""
        if self._on_error is not None:
            self._on_error(self)
        if self.error is None:
            self.error = error

    def __repr__(self) -> str:
        return f"<Operation {self} {self.state}>"

    def __str__(self) -> str:
        return f"{self.what} of {shorten(self.keys)}{self._because}" if self.keys else f"{self.what}{self._because}"

    @property
    def state(self) -> str:
        return "failed" if self.error else "waiting" if self.open else "done"


@outside_graphs
class Ticket:
    """The receipt for a call: ``push``, ``pull`` and ``pushpull`` return one.

    An error belongs to the call that it happened to. ``wait`` raises it, or else the store's next call does.

    A store of your own that has done its work when it returns makes one as ``Ticket("push", keys)``.

    Args:
        of: the name of a call that is done, or the operation that goes on.
        keys: the keys of a call that is done.
    """

    __slots__ = ("__weakref__", "_operation")

    def __init__(self, of: str | Operation, keys: Sequence[Key] = ()) -> None:
        self._operation = Operation(of, keys) if isinstance(of, str) else of

    def done(self) -> bool:
        """Whether the call has taken effect or failed. Takes in what has arrived, and does not wait.

        Raises:
            KVStoreError: the job has ended, so that it never will.
        """
        return self._operation.done()

    def wait(self, timeout: float | None = None) -> Any:
        """Wait until the call has taken effect, for at most ``timeout`` seconds; None waits as long as the store does.

        Raises:
            DeadlineExceeded: it has not taken effect yet. It still may, and ``wait`` may be called again.
            KVStoreError: it failed, here or on a server.
        """
        return self._operation.wait(timeout)

    @property
    def result(self) -> Any:
        """What ``wait`` returns; None until then, and for calls that return nothing."""
        return self._operation.result

    def __repr__(self) -> str:
        return f"<Ticket {self} {self._operation.state}>"

    def __str__(self) -> str:
        return str(self._operation)


def claim(ticket: Ticket) -> Operation:
    """Return the operation that ``ticket`` is for: the door for code of this project, which users do not need."""
    return ticket._operation


def finish(ticket: Ticket, wait: bool) -> Ticket:
    """Wait for ``ticket`` if that is wanted; return it."""
    if wait:
        ticket.wait()
    return ticket
