"""Periodic averaging, or local SGD: weights are averaged over workers every few steps, instead of gradients every step.

Stich, "Local SGD converges fast and communicates little" (arXiv:1805.09767); with data of their own on the workers,
McMahan et al., "Communication-efficient learning of deep networks from decentralized data" (arXiv:1602.05629).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvstore import KVStore, UnknownName, UsageError
from workers.averaging.replicas import Replicas
from workers.common.checks import at_least
from workers.common.chunks import ChunkRange

MOMENTUM = ("keep", "average", "reset")


class PeriodicAveraging(Replicas):
    """Every worker trains alone for ``sync_every`` steps. Then all weights become their mean over workers.

        averaging = PeriodicAveraging(model, optimizer, "dist_sync", sync_every=8)
        for batch in batches:
            ...
            loss.backward()
            averaging.step()
        averaging.finish()

    It sends a ``sync_every``-th of what synchronous training sends. With ``sync_every=1`` and SGD, with or without
    momentum, the weights are those of synchronous training, up to rounding.

    The store's deadline must cover a whole period: a worker may wait for ``sync_every`` steps of the slowest.

    Args:
        model: a module, or its ``named_parameters()``, which has no buffers. Every worker gets rank 0's parameters,
            frozen ones too, and buffers. Frozen parameters count if the optimizer has them. A parameter with several
            names counts once.
        optimizer: an instance of ``torch.optim.Optimizer`` with parameters of ``model``; see ``PartialSync``.
        kvstore: a synchronous store without optimizer, for this alone, or the type of one to make. ``auto``:
            ``dist_sync`` in a job, ``device`` outside of one.
        sync_every: the number of steps in a period.
        warmup_steps: the number of first steps that each end with an average, because weights change fastest then.
            Periods begin after them. This is post-local SGD (Lin et al., arXiv:1808.07217).
        buffers: also average buffers, such as batch-norm statistics; see ``Reducer.average_buffers``.
        momentum: what an average does to the optimizer's states. ``keep``: each worker keeps its own, at no cost.
            ``average``: float tensors except step counts are averaged too, as in Yu et al. (arXiv:1905.03817); this
            sends the weights' size once more for SGD with momentum, twice for Adam, and needs gradients for the same
            parameters on all workers. ``reset``: the states are dropped at the end of a period, but not during warm-up,
            so that each period begins with a new optimizer; this is FedAvg. Adagrad cannot: it makes its states once.

    Raises:
        UsageError: an argument is invalid; or the store updates, or serves another model.
        Mismatch: workers disagree on a setting or the model.
    """

    def __init__(
        self,
        model: Any,
        optimizer: torch.optim.Optimizer,
        kvstore: KVStore | str = "auto",
        sync_every: int = 8,
        warmup_steps: int = 0,
        buffers: bool = True,
        momentum: str = "keep",
    ) -> None:
        self._sync_every = at_least("sync_every", sync_every, 1)
        self._warmup_steps = at_least("warmup_steps", warmup_steps, 0)
        if momentum not in MOMENTUM:
            raise UnknownName(f"unknown momentum={momentum!r}; choose from {', '.join(MOMENTUM)}")
        if momentum == "reset" and isinstance(optimizer, torch.optim.Adagrad):
            raise UsageError(
                "momentum='reset' does not work with Adagrad, which makes its states only once; choose 'keep' or "
                "'average'"
            )
        self._momentum = momentum
        settings: dict[str, int | str] = {
            "sync_every": sync_every,
            "warmup_steps": warmup_steps,
            "momentum": momentum,
        }
        super().__init__(model, optimizer, kvstore, buffers, None, settings)

    def _due(self, step: int) -> Sequence[ChunkRange]:
        local = step - self._warmup_steps
        return self._all if local <= 0 or local % self._sync_every == 0 else ()

    def _states(self) -> dict[str, torch.Tensor]:
        if self._momentum != "average":
            return {}
        return {
            f"{name}/{state}": value
            for name, tensor in self._params.items()
            for state, value in sorted(self._optimizer.state.get(tensor, {}).items())
            if state != "step" and isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel()
        }

    def _average(self, parts: Sequence[ChunkRange]) -> None:
        super()._average(parts)
        if self._momentum == "reset" and self._steps > self._warmup_steps:
            self._optimizer.state.clear()
