"""Local SGD, or periodic averaging: weights are averaged over workers every few steps, not gradients in each.

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
    """Every worker trains alone for ``sync_every`` steps; then all weights become their mean over workers.

        averaging = PeriodicAveraging(model, optimizer, "dist_sync", sync_every=8)
        for batch in batches:
            ...
            loss.backward()
            averaging.step()
        averaging.finish()

    It sends a ``sync_every``-th of what synchronous training does. With ``sync_every`` 1, and SGD, with momentum or
    without, the weights are those of synchronous training, up to rounding.

    The deadline of the store is for a whole period: a worker may wait for the slowest one's ``sync_every`` steps.

    Args:
        model: a module, or its ``named_parameters()``, which has no buffers. Frozen parameters count, if the optimizer
            has them; a parameter with several names counts once.
        optimizer: any of ``torch.optim``, an instance with parameters of ``model``; see ``PartialSync``.
        kvstore: a synchronous store without optimizer, for this alone, or the name of one.
        sync_every: how many steps a period has.
        warmup_steps: average after each of so many first steps, when weights change fastest; periods begin after
            them. This is post-local SGD (Lin et al., arXiv:1808.07217).
        buffers: average floating-point buffers too, such as batch-norm statistics.
        momentum: what becomes of the optimizer's states with an average. ``keep``: each worker's stay its own, at no
            cost. ``average``: tensors of floats, but for step counts, are averaged too, as in Yu et al.
            (arXiv:1905.03817); this sends once more the weights' size for SGD with momentum, twice for Adam, and needs
            workers whose parameters get gradients alike. ``reset``: they are dropped at the end of a period, not
            during warm-up, so that each begins as with a new optimizer; this is FedAvg. Not for Adagrad, which makes
            its states but once.

    Raises:
        UsageError: a wrong argument; the store updates, or serves another model.
        Mismatch: workers disagree on a setting or the model.
    """

    def __init__(
        self,
        model: Any,
        optimizer: torch.optim.Optimizer,
        kvstore: KVStore | str = "dist_sync",
        sync_every: int = 8,
        warmup_steps: int = 0,
        buffers: bool = True,
        momentum: str = "keep",
    ) -> None:
        self._sync_every = at_least("sync_every", sync_every, 1)
        self._warmup_steps = at_least("warmup_steps", warmup_steps, 0)
        if momentum not in MOMENTUM:
            raise UnknownName(f"no momentum={momentum!r}; choose from {', '.join(MOMENTUM)}")
        if momentum == "reset" and isinstance(optimizer, torch.optim.Adagrad):
            raise UsageError("Adagrad makes its states but once; choose momentum='keep' or 'average'")
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
