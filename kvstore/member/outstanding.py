"""The requests that have not been answered, and what their answers change. No sockets, no clock.

An exception may end any function here between two of its lines. So a change of several things is one function that may
run twice. It is noted before it runs, and if it does not come to its end, ``finish`` runs it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from kvstore import wire
from kvstore.errors import KVStoreError
from kvstore.spec import Key
from kvstore.ticket import Operation
from kvstore.transport.memory import ScatteredFrame, whole

# What a request changes when it is made, or its answer when it counts. May run twice.
Effect: TypeAlias = Callable[[], None]


class Turn(NamedTuple):
    """A request waits for its turn: highest ``priority`` first, while the window has room. See ``Window``."""

    nbytes: int
    priority: int


class PendingRequest:
    """A request to ``peer`` that belongs to ``operation``. ``priority`` is as in ``Transport.send``."""

    __slots__ = ("failure", "frames", "in_flight", "operation", "peer", "priority", "seq", "turn")
    # Whether the message is made before anything is sent, so that an error in making it is the call's. Otherwise it is
    # made when it goes, from the caller's arrays, and that must not fail.
    early = True
    remembered = True  # whether servers keep its answer for repeats

    def __init__(
        self, peer: bytes, operation: Operation, priority: int | None = None, turn: Turn | None = None
    ) -> None:
        self.peer = peer
        self.operation = operation
        self.priority = priority
        self.turn = turn  # when it may go; None sends it at once
        self.seq = 0
        self.in_flight = False  # whether it has been sent
        self.failure: Exception | None = None  # what was raised when the message was first made
        self.frames: Sequence[wire.Buffer | ScatteredFrame] | None = None  # kept to be resent; None until it is made

    def message(self, sender: wire.Sender) -> wire.Message:
        raise NotImplementedError

    def take(self, reply: Any) -> Effect | None:
        """Take the values of the answer; return what changes when the answer counts. May be called twice.

        Raises:
            KVStoreError: the answer cannot be taken, which fails the operation.
        """
        return None

    @property
    def traced(self) -> tuple[str, Sequence[Key], int]:
        """The name of the request in a trace, its keys, and how many bytes it is about."""
        return self.operation.what, self.operation.keys, 0

    def bypass(self) -> bytes | None:
        """Return whom to send this to now that ``peer``, this host's aggregator, is lost; None if nobody needs it.

        The message is another one from now on, if a server does not take what was for an aggregator. May be called
        twice.
        """
        return None

    def moot(self) -> wire.Reply:
        """Return what stands for the answer if nobody needs the request any more; see ``bypass``."""
        return wire.Ack(self.seq)

    def forsake(self) -> None:
        """Take no values from now on: the caller has its arrays back."""

    @property
    def borrows(self) -> bool:
        """Whether the message reads the caller's arrays, which may change once the call is over."""
        if self.frames is None:
            return not self.early
        return any(isinstance(frame, ScatteredFrame) for frame in self.frames)

    def own(self) -> None:
        """Replace references to the caller's arrays by copies. The message has been made."""
        if self.frames is not None:
            self.frames = list(map(whole, self.frames))


class Question(PendingRequest):
    """A request of class ``kind``. ``on_reply`` takes the answer if it is no failure.

    Its ``fields`` are known, or what returns them is, and is called when the message is made.
    """

    __slots__ = ("fields", "kind", "on_reply", "remembered")

    def __init__(
        self,
        peer: bytes,
        operation: Operation,
        kind: type[wire.Request],
        fields: Mapping[str, Any] | Callable[[], Mapping[str, Any]],
        on_reply: Callable[[Any], None] | None = None,
    ) -> None:
        super().__init__(peer, operation)
        self.kind = kind
        self.remembered = kind.remembered
        self.fields = fields
        self.on_reply = on_reply

    def message(self, sender: wire.Sender) -> wire.Message:
        return self.kind(sender, **(self.fields() if callable(self.fields) else self.fields))

    def moot(self) -> wire.Reply:
        if self.kind is wire.GetStates:
            return wire.OptimizerStates(self.seq, None, [], [], [], [], [])
        if self.kind is wire.Lend:
            return wire.Borrowed(self.seq, "the aggregator of this host is lost")
        if self.kind is wire.Explain:
            return wire.Explanation(self.seq, "")
        return super().moot()

    def take(self, reply: Any) -> Effect | None:
        if self.on_reply is not None:
            self.on_reply(reply)
        return None


def ready(
    _operation: Operation, requests: Sequence[PendingRequest], effect: Effect | None = None
) -> tuple[Sequence[PendingRequest], Effect | None]:
    """Prepare nothing: ``requests`` are made already, and ``effect`` belongs to them; see ``Prepare``."""
    return requests, effect


def _refusal(exc: Exception) -> KVStoreError:
    if isinstance(exc, KVStoreError):
        return exc
    error = KVStoreError(f"the answer could not be taken: {type(exc).__name__}: {exc}")
    error.__cause__ = exc
    return error


class Outstanding:
    """The requests without an answer, by sequence number."""

    def __init__(self) -> None:
        self._next = 1
        self._requests: dict[int, PendingRequest] = {}
        self._unfinished: Effect | None = None

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[PendingRequest]:
        return iter(list(self._requests.values()))

    @property
    def done(self) -> int:
        """Every request below this number has been answered, but for those that nobody need remember."""
        for seq, request in self._requests.items():  # numbers grow, and dicts keep their order
            if request.remembered:
                return seq
        return self._next

    @property
    def in_doubt(self) -> bool:
        return self._unfinished is not None

    def number(self, requests: Sequence[PendingRequest]) -> None:
        """Give ``requests`` the next numbers. ``add`` takes these numbers."""
        for seq, request in enumerate(requests, self._next):
            request.seq = seq

    def add(self, requests: Sequence[PendingRequest], effect: Effect | None = None) -> None:
        """Add ``requests``, and run ``effect``, as one change."""
        self._do(partial(self._add, requests, effect))

    def find(self, peer: bytes, seq: int) -> PendingRequest | None:
        """Return the request that ``peer`` answers; None if the answer is a repeat, or not for ``peer`` to give."""
        request = self._requests.get(seq)
        return None if request is None or request.peer != peer else request

    def settle(self, request: PendingRequest, reply: wire.Reply | None, error: KVStoreError | None) -> None:
        """Hand ``reply`` to ``request`` and let it go; ``error``, or one of taking the reply, fails its operation."""
        effect: Effect | None = None
        interrupt: Exception | None = None
        if error is None and reply is not None:
            try:
                effect = request.take(reply)
            except Exception as exc:
                interrupt = exc
            if interrupt is not None:
                try:
                    effect = request.take(reply)
                except Exception as exc:  # a second time, so it does not come from a signal's handler
                    error, interrupt = _refusal(exc), None
        self._do(partial(self._settle, request, effect, error))
        if interrupt is not None:
            raise interrupt

    def finish(self) -> None:
        if self._unfinished is not None:
            self._do(self._unfinished)

    def of(self, operation: Operation) -> dict[int, bytes]:
        return {request.seq: request.peer for request in self.requests_of(operation)}

    def requests_of(self, operation: Operation) -> list[PendingRequest]:
        return [self._requests[seq] for seq in sorted(operation.open) if seq in self._requests]

    def _do(self, effect: Effect) -> None:
        self._unfinished = effect
        effect()
        self._unfinished = None

    def _add(self, requests: Sequence[PendingRequest], effect: Effect | None) -> None:
        if effect is not None:
            effect()
        for request in requests:
            self._requests[request.seq] = request
            request.operation.open.add(request.seq)
        self._next = requests[-1].seq + 1

    def _settle(self, request: PendingRequest, effect: Effect | None, error: KVStoreError | None) -> None:
        if effect is not None:
            effect()
        if error is not None:
            request.operation.fail(error)
        self._requests.pop(request.seq, None)
        request.operation.open.discard(request.seq)  # last: from now on another thread may see the operation as done
