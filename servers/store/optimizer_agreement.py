"""``set_optimizer`` of one store: worker 0's call takes effect, and those of others are compared with it. Pure."""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeAlias

from kvstore import wire
from kvstore.errors import NodeLost, UsageError, rebuild
from kvstore.optim.optimizer import Optimizer, describe
from servers.requests.agreement import Agreement
from servers.requests.reasons import Reason
from servers.requests.replies import Answer, described_error, refuse
from servers.requests.reply_links import NOWHERE
from servers.store.hyperparameters import UpdateHyperparameters, changed
from servers.store.served_store import ServedStore

Asker: TypeAlias = tuple[bytes, wire.SetOptimizer]


class OptimizerAgreement:
    """The calls of ``set_optimizer`` of one store.

    Args:
        store: its number.
        served: the store.
        rank: of the server, for messages.
    """

    def __init__(self, store: int, served: ServedStore, rank: int) -> None:
        self._store = store
        self._served = served
        self._rank = rank
        self._calls: Agreement[Optimizer, Asker] = Agreement("set_optimizer")

    @property
    def waiting(self) -> list[wire.SetOptimizer]:
        """The calls that wait for worker 0's."""
        return [request for _, request in self._calls.waiting]

    def take(self, peer: bytes, message: wire.SetOptimizer) -> list[Answer]:
        """Take a worker's call; return the answers to those that need not wait any more.

        Raises:
            UsageError: there is no such optimizer on this server.
        """
        proposal = self._proposal(message)
        outcomes = (
            self._calls.decide(message.version, proposal, (peer, message), self._served.set_optimizer)
            if message.node.rank == 0
            else self._calls.propose(message.version, proposal, (peer, message))
        )
        return [
            Answer(whom, request, wire.Ack(request.seq)) if error is None else refuse(whom, request, error)
            for (whom, request), error in outcomes
        ]

    def abandon(self, error: Exception) -> list[Answer]:
        """Fail the calls that wait for worker 0's."""
        return [refuse(*asker, error) for asker in self._calls.abandon()]

    def abandon_if_vain(self, departed: Collection[int]) -> list[Answer]:
        """Fail the calls that wait for worker 0's if it has left the job, or is inside ``join``.

        Args:
            departed: the workers that have left in order.
        """
        if 0 in departed:
            return self.abandon(NodeLost("worker 0 has left the job without calling set_optimizer"))
        if 0 in self._served.pauses.ranks:
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
        updater = self._served.updates.updater
        last = UpdateHyperparameters()
        if updater is not None and self._served.rule.mode == "async":  # else a round's own are all that matters
            last = UpdateHyperparameters(updater.lr, updater.rescale_grad, tuple(updater.changes.items()))
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
        """Have the calls that another server has recorded, and its optimizer.

        Raises:
            ValueError: something else is among them.
        """
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
            self._served.updates.restore(optimizer, last)

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
