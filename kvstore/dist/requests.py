"""What a worker says to the scheduler and the servers about one store, apart from pushes and pulls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from kvstore.dist.outgoing import Packer
from kvstore.dist.plans.entries import Entries, Segment, SegmentColumns
from kvstore.dist.plans.parcels import Parcel
from kvstore.dist.plans.plan import Plan
from kvstore.member.outstanding import Effect, PendingRequest, Question
from kvstore.member.session import Session
from kvstore.optim.optimizer import Optimizer
from kvstore.rule import Rule
from kvstore.spec import Key, Spec
from kvstore.ticket import Operation, WaitLimits
from kvstore.values import Leaving, from_buffer, spec_of, to_buffer
from kvstore.wire import (
    Barrier,
    Close,
    CloseStore,
    Declare,
    GetStates,
    Init,
    Message,
    Open,
    OpenStore,
    OptimizerStates,
    Pause,
    Placed,
    PutStates,
    Ready,
    Reply,
    Resume,
    Sender,
    SetOptimizer,
    StoreOpened,
    pack_arrays,
    unpack_arrays,
)

Make = Callable[[Sender], Message]


class Requests:
    """The requests of one store. Those that return no operation wait for the answer.

    Args:
        session: this process's membership in the job.
        ordinal: which of this worker's stores it is: the n-th store of one worker is the n-th of the others.
        rule: how updates and reads go together; all servers are told.
        limits: of every wait.

    Attributes:
        store: its number on the wire.
    """

    def __init__(self, session: Session, ordinal: int, rule: Rule, limits: WaitLimits) -> None:
        self._session = session
        self._client = session.client
        self.limits = limits
        self.packer = Packer(session.client)
        opened: StoreOpened = self._one(
            session.scheduler, "opening the store", (), lambda sender: OpenStore(sender, ordinal=ordinal)
        )
        self.store = opened.store
        self._all(
            "opening the store",
            lambda sender: Open(
                sender,
                store=self.store,
                mode=rule.mode,
                staleness=rule.staleness,
                quorum=rule.quorum,
                late=rule.late,
                compensation=float(rule.compensation),
                finite=rule.finite,
            ),
        )

    def close(self) -> None:
        """Tell the servers, and then the scheduler, that this worker does not use the store any more."""
        self._all("closing the store", lambda sender: Close(sender, store=self.store))
        self._one(self._session.scheduler, "closing the store", (), lambda sender: CloseStore(sender, store=self.store))

    def declare(
        self, keys: Sequence[Key], kinds: Sequence[int], specs: Sequence[Spec], bound: int, longest: int
    ) -> Entries:
        """Have new keys placed (rank 0), or wait until rank 0's values of them are on the servers.

        Args:
            keys, kinds, specs: the array of ``keys[i]`` is one of ``specs[kinds[i]]``.
            bound, longest: see ``Declare``.
        """
        placed: Placed = self._one(
            self._session.scheduler,
            "init",
            keys,
            lambda sender: Declare(
                sender,
                store=self.store,
                keys=list(keys),
                kinds=list(kinds),
                shapes=[list(spec.shape) for spec in specs],
                dtypes=[spec.dtype for spec in specs],
                bound=bound,
                longest=longest,
            ),
        )
        columns = (placed.counts, placed.ids, placed.servers, placed.starts, placed.stops)
        return Entries.of(keys, kinds, specs, SegmentColumns(*(np.array(column, np.int64) for column in columns)))

    def put_values(self, plan: Plan, values: Leaving, effect: Effect) -> None:
        """Give the servers the first values of a plan's keys, then tell the scheduler; ``effect`` is a part of that."""
        operation = self._operation("init", plan.keys)
        for parcel in plan.parcels:
            self._client.ask(self._session.servers[parcel.server], operation, partial(self._init, parcel, values))
        operation.wait()
        self._exchange(
            self._operation("init", plan.keys),
            [(self._session.scheduler, lambda sender: Ready(sender, store=self.store, keys=list(plan.keys)))],
            effect,
        )

    def _init(self, parcel: Parcel, values: Leaving, sender: Sender) -> Init:
        kinds, shapes = parcel.shapes()
        return Init(
            sender,
            store=self.store,
            ids=parcel.ids,
            keys=parcel.keys(),
            kinds=kinds,
            shapes=shapes,
            dtype=parcel.dtype,
            buffers=self.packer.pack(parcel, values),
        )

    def set_optimizer(self, version: int, optimizer: Optimizer, effect: Effect) -> None:
        """Have all servers update with ``optimizer``; when the last of them does, ``effect`` follows."""

        def make(sender: Sender) -> SetOptimizer:
            return SetOptimizer(
                sender,
                store=self.store,
                version=version,
                name=optimizer.name,
                hyper=[[name, value] for name, value in optimizer.hyper.items()],
                clip_gradient=optimizer.clip_gradient,
                lr_mult=[[key, value] for key, value in optimizer.lr_mult.items()],
                wd_mult=[[key, value] for key, value in optimizer.wd_mult.items()],
                lr=optimizer.lr,
                rescale=optimizer.rescale_grad,
                groups=[[list(group.keys), [[*pair] for pair in group.hyper.items()]] for group in optimizer.groups],
            )

        operation = self._operation("set_optimizer")
        questions = [_Last(peer, operation, make, effect) for peer in self._session.servers]
        self._client.exchange(lambda: (questions, None), operation)

    def optimizer(self) -> str | None:
        """Return the name of the optimizer that the servers have, or None."""
        reply: OptimizerStates = self._one(
            self._session.servers[0],
            "asking for the optimizer",
            (),
            lambda sender: GetStates(sender, store=self.store, ids=[]),
        )
        return reply.optimizer

    def get_states(self, parcel: Parcel) -> dict[tuple[Segment, str], torch.Tensor]:
        """Return the optimizer's states of a parcel's segments, by (segment, name of the state)."""
        reply: OptimizerStates = self._one(
            self._session.servers[parcel.server],
            "save_optimizer_states",
            (),
            lambda sender: GetStates(sender, store=self.store, ids=parcel.ids),
        )
        by_id = {segment.id: segment for segment in parcel.segments}
        specs = [Spec(tuple(shape), dtype) for shape, dtype in zip(reply.shapes, reply.dtypes, strict=True)]
        parts = unpack_arrays(reply.buffers, [spec.nbytes for spec in specs])
        return {
            (by_id[number], name): from_buffer(part, spec.dtype).view(spec.shape)
            for number, name, spec, part in zip(reply.ids, reply.names, specs, parts, strict=True)
        }

    def put_states(self, server: int, states: Mapping[tuple[Segment, str], torch.Tensor]) -> None:
        """Give a server the optimizer's states of segments that it holds."""
        specs = [spec_of(value) for value in states.values()]
        self._one(
            self._session.servers[server],
            "load_optimizer_states",
            (),
            lambda sender: PutStates(
                sender,
                store=self.store,
                ids=[segment.id for segment, _ in states],
                names=[name for _, name in states],
                shapes=[list(spec.shape) for spec in specs],
                dtypes=[spec.dtype for spec in specs],
                buffers=pack_arrays([to_buffer(value.contiguous()) for value in states.values()]),
            ),
        )

    def barrier(self, number: int, begun: Callable[[Operation], None]) -> None:
        """Come to the store's barrier ``number``.

        Args:
            begun: gets the operation that is done when all workers have come.
        """
        operation = self._operation("barrier")
        question = Question(
            self._session.scheduler, operation, lambda sender: Barrier(sender, store=self.store, number=number)
        )
        self._client.submit(lambda: ([question], partial(begun, operation)), operation)

    def announce_pause(self, number: int) -> None:
        """Tell the scheduler of this worker's pause ``number``, before any server lets others go on because of it."""
        self._one(
            self._session.scheduler,
            "join",
            (),
            lambda sender: Pause(sender, store=self.store, number=number, pushes=0, ids=[], clocks=[]),
        )

    def pause(
        self,
        number: int,
        clocks: Callable[[], Mapping[Segment, int]],
        take: Callable[[Sequence[int], Resume], None],
        begun: Callable[[Operation], None],
    ) -> None:
        """Tell all servers that this worker has nothing more to contribute.

        Args:
            clocks: returns how often each segment has been pushed.
            take: is given each server's answer, with the segments that it is about.
            begun: gets the operation that is done when the servers let this worker go on.
        """
        operation = self._operation("join")

        def work() -> tuple[Sequence[PendingRequest], Effect]:
            by_server: list[dict[int, int]] = [{} for _ in self._session.servers]
            pushes: dict[Key, int] = {}
            for segment, clock in clocks().items():
                by_server[segment.server][segment.id] = clock
                pushes[segment.key] = clock
            questions = [
                self._pausing(peer, operation, number, sum(pushes.values()), pushed, take)
                for peer, pushed in zip(self._session.servers, by_server, strict=True)
            ]
            return questions, partial(begun, operation)

        self._client.submit(work, operation)

    def _pausing(
        self,
        peer: bytes,
        operation: Operation,
        number: int,
        pushes: int,
        pushed: Mapping[int, int],
        take: Callable[[Sequence[int], Resume], None],
    ) -> Question:
        ids = list(pushed)
        return Question(
            peer,
            operation,
            lambda sender: Pause(sender, self.store, number, pushes, ids, list(pushed.values())),
            partial(take, ids),
        )

    def _one(self, peer: bytes, what: str, keys: Iterable[Key], make: Make) -> Any:
        operation = self._operation(what, keys)
        return self._exchange(operation, [(peer, make)])

    def _all(self, what: str, make: Make) -> None:
        self._exchange(self._operation(what), [(peer, make) for peer in self._session.servers])

    def _exchange(self, operation: Operation, asked: Sequence[tuple[bytes, Make]], effect: Effect | None = None) -> Any:
        questions = [Question(peer, operation, make, operation.take) for peer, make in asked]
        return self._client.exchange(lambda: (questions, effect), operation)

    def _operation(self, what: str, keys: Iterable[Key] = ()) -> Operation:
        return Operation(what, list(keys), self._client, limits=self.limits)


class _Last(Question):
    """One of several questions; the last one that is answered well has an effect."""

    __slots__ = ("effect",)

    def __init__(self, peer: bytes, operation: Operation, make: Make, effect: Effect) -> None:
        super().__init__(peer, operation, make)
        self.effect = effect

    def take(self, reply: Reply) -> Effect | None:
        """See ``PendingRequest``."""
        return self.effect if self.operation.open == {self.seq} and self.operation.error is None else None
