"""``set_optimizer`` of one store: worker 0's call takes effect, and other workers' calls are compared with it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TypeAlias

from kvstore import wire
from kvstore.errors import Mismatch, NodeLost, UsageError, rebuild
from kvstore.optim.optimizer import Optimizer, describe
from servers.requests.reasons import Reason
from servers.requests.replies import Answer, described_error, refuse
from servers.store.array_updates import Updates
from servers.store.hyperparameters import UpdateHyperparameters

Call: TypeAlias = tuple[bytes, wire.SetOptimizer]  # with the link that it came over


class OptimizerAgreement:
    """The calls of ``set_optimizer`` of one store; ``set_optimizer`` takes effect on its arrays and tables.

    The n-th call of one worker is compared with the n-th of the others: that is its ``version``.
    """

    def __init__(self, store: int, updates: Updates, set_optimizer: Callable[[Optimizer], None], rank: int) -> None:
        self._store = store
        self._updates = updates
        self._set_optimizer = set_optimizer
        self._rank = rank
        self._first = 0  # whose calls take effect: worker 0, or the lowest rank that is not lost
        self._decided: dict[int, tuple[Optimizer, Exception | None, wire.SetOptimizer]] = {}
        self._waiting: dict[int, list[tuple[Call, Optimizer]]] = {}  # for worker 0's call of that version

    @property
    def waiting(self) -> list[wire.SetOptimizer]:
        return [request for waiting in self._waiting.values() for (_, request), _ in waiting]

    def take(self, peer: bytes, message: wire.SetOptimizer) -> list[Answer]:
        """Take a worker's call; return the answers to those that need not wait any more."""
        version, proposal = message.version, self._proposal(message)
        calls = [((peer, message), proposal)]
        leads = message.node.rank == self._first
        # A worker that was started again makes the calls of the one before it once more.
        if leads and (message.node == wire.Node("worker", 0, 1) or version not in self._decided):
            error: Exception | None = None
            try:
                self._set_optimizer(proposal)
            except Exception as exc:
                error = exc  # it fails for all workers that agree
            self._decided[version] = proposal, error, message
            calls += self._waiting.pop(version, [])
        elif version not in self._decided:
            self._waiting.setdefault(version, []).extend(calls)
            return []
        return [self._answer(*call, self._outcome(version, proposed)) for call, proposed in calls]

    def abandon(self, error: Exception) -> list[Answer]:
        waiting = [refuse(*call, error) for calls in self._waiting.values() for call, _ in calls]
        self._waiting.clear()
        return waiting

    def lead(self, rank: int) -> list[Answer]:
        """Let the calls of worker ``rank`` take effect from now on, since those before it are lost: one may wait."""
        if rank == self._first:
            return []
        self._first = rank
        answers: list[Answer] = []
        for version in sorted(self._waiting):
            own = next((call for call, _ in self._waiting[version] if call[1].node.rank == rank), None)
            if own is not None:
                self._waiting[version] = [each for each in self._waiting[version] if each[0] is not own]
                answers += self.take(*own)
        return answers

    def abandon_if_vain(self, departed: Collection[int], inside: Collection[int]) -> list[Answer]:
        """Fail the calls that wait for the first worker's if it has left the job, or is ``inside`` ``join``."""
        first = f"worker {self._first}"
        if self._first in departed:
            return self.abandon(NodeLost(f"{first} has left the job without calling set_optimizer"))
        if self._first in inside:
            return self.abandon(UsageError(f"{first} is inside join(), and has not called set_optimizer"))
        return []

    def explain(self, node: wire.Node, about: int) -> Reason:
        """Say what request ``about`` of ``node`` waits for; nothing if it is no call that waits."""
        if any(request.node == node and request.seq == about for request in self.waiting):
            return Reason(f"waits for worker {self._first}, which has not called set_optimizer", [self._first])
        return Reason()

    def _outcome(self, version: int, proposal: Optimizer) -> Exception | None:
        decided, error, _ = self._decided[version]
        if proposal != decided:
            return Mismatch(f"set_optimizer differs from worker {self._first}'s: {proposal} here, {decided} there")
        return error

    def _answer(self, peer: bytes, request: wire.SetOptimizer, error: Exception | None) -> Answer:
        return Answer(peer, request, wire.Ack(request.seq)) if error is None else refuse(peer, request, error)

    # ---- for a standby

    def record(self) -> wire.OptimizerCalls:
        """Return the record of worker 0's calls, and of the hyper-parameters that pushes have changed since."""
        last = self._updates.last
        errors = {version: error for version, (_, error, _) in self._decided.items() if error is not None}
        return wire.OptimizerCalls(
            self._store,
            list(self._decided),
            [[version, *described_error(error)] for version, error in errors.items()],
            last.lr,
            last.rescale,
            last.listed(),
            [wire.encode(request)[0] for _, _, request in self._decided.values()],
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
            self._decided[version] = proposal, failures.get(version), request
            optimizer = optimizer if version in failures else proposal
        if optimizer is not None:
            self._updates.restore(optimizer, UpdateHyperparameters.of(message))

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
