"""``set_optimizer`` of one store: worker 0's call takes effect, and those of others are compared with it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Generic, TypeAlias, TypeVar

from kvstore import wire
from kvstore.errors import Mismatch, NodeLost, UsageError, rebuild
from kvstore.optim.optimizer import Optimizer, describe
from servers.requests.reasons import Reason
from servers.requests.replies import Answer, described_error, refuse
from servers.requests.reply_links import NOWHERE
from servers.store.hyperparameters import UpdateHyperparameters, changed
from servers.store.updates import Updates

Asker: TypeAlias = tuple[bytes, wire.SetOptimizer]


T = TypeVar("T")  # a proposal
A = TypeVar("A")  # an asker


class Agreement(Generic[T, A]):
    """One kind of call.

    The n-th call of one worker is compared with the n-th of the others: that is its ``version``.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._decided: dict[int, tuple[T, Exception | None, A]] = {}
        self._waiting: dict[int, list[tuple[A, T]]] = {}

    @property
    def decided(self) -> list[tuple[int, A, Exception | None]]:
        """Rank 0's calls in their order: version, asker, and the error of those that have failed."""
        return [(version, who, error) for version, (_, error, who) in self._decided.items()]

    def restore(self, version: int, proposal: T, who: A, error: Exception | None) -> None:
        self._decided[version] = (proposal, error, who)

    @property
    def waiting(self) -> list[A]:
        return [who for waiting in self._waiting.values() for who, _ in waiting]

    def decide(self, version: int, proposal: T, who: A, act: Callable[[T], None]) -> list[tuple[A, Exception | None]]:
        """Take rank 0's call: act, and return the outcome for ``who`` and for those who waited for it."""
        error: Exception | None = None
        try:
            act(proposal)
        except Exception as exc:
            error = exc
        self._decided[version] = (proposal, error, who)
        waiting = [(other, self._outcome(version, proposed)) for other, proposed in self._waiting.pop(version, [])]
        return [(who, error), *waiting]

    def propose(self, version: int, proposal: T, who: A) -> list[tuple[A, Exception | None]]:
        """Take another rank's call: return its outcome if rank 0 has called, else nothing yet."""
        if version in self._decided:
            return [(who, self._outcome(version, proposal))]
        self._waiting.setdefault(version, []).append((who, proposal))
        return []

    def abandon(self) -> list[A]:
        """Return, and forget, those who wait for rank 0, because its call will not come."""
        waiting = self.waiting
        self._waiting.clear()
        return waiting

    def _outcome(self, version: int, proposal: T) -> Exception | None:
        decided, error, _ = self._decided[version]
        if proposal != decided:
            return Mismatch(f"{self._what} differs from worker 0's: {proposal} here, {decided} there")
        return error


class OptimizerAgreement:
    """The calls of ``set_optimizer`` of one store; ``set_optimizer`` takes effect on its arrays and tables."""

    def __init__(self, store: int, updates: Updates, set_optimizer: Callable[[Optimizer], None], rank: int) -> None:
        self._store = store
        self._updates = updates
        self._set_optimizer = set_optimizer
        self._rank = rank
        self._calls: Agreement[Optimizer, Asker] = Agreement("set_optimizer")

    @property
    def waiting(self) -> list[wire.SetOptimizer]:
        return [request for _, request in self._calls.waiting]

    def take(self, peer: bytes, message: wire.SetOptimizer) -> list[Answer]:
        """Take a worker's call; return the answers to those that need not wait any more."""
        proposal = self._proposal(message)
        outcomes = (
            self._calls.decide(message.version, proposal, (peer, message), self._set_optimizer)
            if message.node.rank == 0
            else self._calls.propose(message.version, proposal, (peer, message))
        )
        return [
            Answer(whom, request, wire.Ack(request.seq)) if error is None else refuse(whom, request, error)
            for (whom, request), error in outcomes
        ]

    def abandon(self, error: Exception) -> list[Answer]:
        return [refuse(*asker, error) for asker in self._calls.abandon()]

    def abandon_if_vain(self, departed: Collection[int], inside: Collection[int]) -> list[Answer]:
        """Fail the calls that wait for worker 0's if it has left the job, or is ``inside`` ``join``."""
        if 0 in departed:
            return self.abandon(NodeLost("worker 0 has left the job without calling set_optimizer"))
        if 0 in inside:
            return self.abandon(UsageError("worker 0 is inside join(), and has not called set_optimizer"))
        return []

    def explain(self, node: wire.Node, about: int) -> Reason:
        """Say what request ``about`` of ``node`` waits for; nothing if it is no call that waits."""
        if any(request.node == node and request.seq == about for request in self.waiting):
            return Reason("waits for worker 0, which has not called set_optimizer", [0])
        return Reason()

    # ---- for a standby

    def record(self) -> wire.OptimizerCalls:
        """Return the record of worker 0's calls, and of the hyper-parameters that pushes have changed since."""
        last = self._updates.last
        calls = self._calls.decided
        return wire.OptimizerCalls(
            self._store,
            [version for version, _, _ in calls],
            [[version, *described_error(error)] for version, _, error in calls if error is not None],
            last.lr,
            last.rescale,
            last.listed(),
            [wire.encode(request)[0] for _, (_, request), _ in calls],
        )

    def restore(self, message: wire.OptimizerCalls) -> None:
        """Have the calls that another server has recorded, and its optimizer."""
        failures = {version: rebuild(kind, text) for version, kind, text in message.failures}
        optimizer: Optimizer | None = None
        for version, frame in zip(message.versions, message.buffers, strict=True):
            request = wire.decode([frame])
            if not isinstance(request, wire.SetOptimizer):
                raise ValueError(f"a {type(request).__name__} among the calls of set_optimizer")
            proposal = self._proposal(request)
            self._calls.restore(version, proposal, (NOWHERE, request), failures.get(version))
            optimizer = optimizer if version in failures else proposal
        if optimizer is not None:
            last = UpdateHyperparameters(message.lr, message.rescale, tuple(changed(message.changes).items()))
            self._updates.restore(optimizer, last)

    def _proposal(self, message: wire.SetOptimizer) -> Optimizer:
        given = dict(message.hyper) | {
            "lr": message.lr,
            "rescale_grad": message.rescale,
            "clip_gradient": message.clip_gradient,
            "lr_mult": dict(message.lr_mult),
            "wd_mult": dict(message.wd_mult),
            "groups": [{"keys": keys, **dict(hyper)} for keys, hyper in message.groups],
        }
        try:
            return describe(message.name, given)
        except UsageError as exc:  # the worker may well have what this process has not
            raise type(exc)(f"server {self._rank}: {exc}") from None
