"""The requests that push and pull arrays, until they are answered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from kvstore import wire
from kvstore.client.clocks import PushClocks
from kvstore.client.incoming import Decode, Writer
from kvstore.client.lending import LentLoad
from kvstore.client.optimizer import PushHyperparameters
from kvstore.client.outgoing import Load
from kvstore.client.plans.parcels import Parcel
from kvstore.member.outstanding import Effect, PendingRequest, Turn
from kvstore.member.session import Session
from kvstore.spec import Key
from kvstore.ticket import Operation
from kvstore.tracing.tracer import Tracer

WORTH_NOTING = 64 << 10  # bytes; copies of fewer take less time than it takes to note them


class ParcelNoted(Protocol):
    """Returns the effect of an answer on the counters and clocks."""

    def __call__(self, parcel: Parcel, reply: wire.Ack | wire.Values, pushed: int, pulled: bool) -> Effect:
        """See ``Pushes.noted``."""
        ...


class ArrayAsker(NamedTuple):
    """What all requests for arrays of a store have in common.

    Attributes:
        store: its number.
        session: of this process: who is asked, and whose links carry the messages.
        clocks: of this worker's keys.
        noted: see ``ParcelNoted``.
    """

    store: int
    session: Session
    clocks: PushClocks
    noted: ParcelNoted


class IncomingParcel(NamedTuple):
    """How the values of a parcel come: into what, in which encoding, and when they may be asked for."""

    writer: Writer
    decode: Decode | None
    codec: wire.CodecDescription
    turn: Turn | None


class PushedValues(NamedTuple):
    """What all messages of a push have in common: values, hyper-parameters, and the order among other messages."""

    load: Load
    hyper: PushHyperparameters
    order: int | None


class _ArrayRequest(PendingRequest):
    """A request about a parcel's segments; ``incoming`` is None where their values are not wanted, or no longer."""

    __slots__ = ("asker", "clocks", "codec", "incoming", "parcel")

    def __init__(
        self,
        asker: ArrayAsker,
        operation: Operation,
        parcel: Parcel,
        clocks: list[int],
        incoming: IncomingParcel | None,
        order: int | None,
    ) -> None:
        turn = None if incoming is None else incoming.turn
        super().__init__(asker.session.carrier(parcel.server), operation, order if turn is None else None, turn)
        self.asker = asker
        self.parcel = parcel
        self.clocks = clocks
        self.incoming = incoming
        self.codec = None if incoming is None else incoming.codec

    def take(self, reply: Any) -> Effect:
        """See ``PendingRequest``."""
        incoming = self.incoming
        if incoming is not None:
            tracer = self.asker.session.tracer
            if tracer is not None and not self._is_noted(tracer):
                tracer = None
            began = 0.0 if tracer is None else tracer.clock()
            incoming.writer.take(self.parcel, reply, incoming.decode)
            if tracer is not None:
                tracer.span(
                    "unpack" if incoming.decode is None else "decode", began, self.operation.keys, self.parcel.nbytes
                )
        return self.asker.noted(self.parcel, reply, self._sent, incoming is not None)

    @property
    def traced(self) -> tuple[str, Sequence[Key], int]:
        """See ``PendingRequest``."""
        return self.operation.what, self.operation.keys, self.parcel.nbytes

    def forsake(self) -> None:
        """See ``PendingRequest``."""
        self.incoming = None

    @property
    def _sent(self) -> int:
        return 0

    def _is_noted(self, tracer: Tracer) -> bool:
        """Whether a trace shows how long it takes to copy the values, or to encode them."""
        return tracer.open and self.parcel.nbytes >= WORTH_NOTING


class PullOfArrays(_ArrayRequest):
    """The values that include this worker's contributions so far."""

    __slots__ = ()

    def __init__(
        self, asker: ArrayAsker, operation: Operation, parcel: Parcel, incoming: IncomingParcel | None
    ) -> None:
        super().__init__(asker, operation, parcel, asker.clocks.of(parcel), incoming, None)

    def message(self, sender: wire.Sender) -> wire.Pull:
        """See ``PendingRequest``."""
        return wire.Pull(sender, self.asker.store, self.parcel.ids, self.clocks, self.codec)

    def forsake(self) -> None:
        """See ``PendingRequest``. Whether the pull fails does not matter any more, either."""
        super().forsake()
        self.operation.raised = True


class PushOfArrays(_ArrayRequest):
    """This worker's contribution to a parcel's segments. Its values are packed, or encoded, when it is sent."""

    __slots__ = ("contribution", "sent", "want")
    early = False

    def __init__(
        self,
        asker: ArrayAsker,
        operation: Operation,
        parcel: Parcel,
        incoming: IncomingParcel | None,
        contribution: PushedValues,
    ) -> None:
        super().__init__(asker, operation, parcel, asker.clocks.after(parcel), incoming, contribution.order)
        self.contribution = contribution
        self.want = incoming is not None
        self.sent = 0  # bytes of gradients

    def message(self, sender: wire.Sender) -> wire.Push | wire.PushLent:
        """See ``PendingRequest``."""
        gather = self.turn is not None and self.asker.session.client.gathers(self.peer)
        load, hyper, order = self.contribution
        tracer = self.asker.session.tracer
        if tracer is not None and not self._is_noted(tracer):
            tracer = None
        began = 0.0 if tracer is None else tracer.clock()
        buffers, codec, lengths, segment_counts, encode, in_float32 = load.pack(self.parcel, gather)
        if tracer is not None:
            tracer.span("pack" if codec is None else "encode", began, self.operation.keys, self.parcel.nbytes)
        plain = self.parcel.sum_bytes if in_float32 else self.parcel.nbytes
        self.sent = plain if codec is None else sum(lengths)
        return wire.Push(
            sender,
            store=self.asker.store,
            ids=self.parcel.ids,
            clocks=self.clocks,
            want=self.want,
            lr=hyper.lr,
            rescale=hyper.rescale,
            codec=codec,
            lengths=list(lengths),
            segment_counts=list(segment_counts),
            back=self.codec,
            changes=hyper.changes,
            priority=order,
            encode=encode,
            in_float32=in_float32,
            buffers=buffers,
        )

    @property
    def _sent(self) -> int:
        return self.sent


class PushOfLentArrays(PushOfArrays):
    """A contribution that the aggregator reads from memory of this worker's device."""

    __slots__ = ()

    def message(self, sender: wire.Sender) -> wire.PushLent:
        """See ``PendingRequest``."""
        push, load = super().message(sender), self.contribution.load
        if not isinstance(push, wire.Push) or not isinstance(load, LentLoad):
            raise AssertionError("a push of lent memory without any")
        return wire.PushLent.of(push, load.loan(self.parcel))
