"""SGD of rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kvstore.optim.rows.rule import RowRule, RowState, prepare


class SGDRows(RowRule):
    """SGD; with momentum, a row that has no gradient neither moves nor loses momentum, as in MXNet.

    In torch's style ``m = momentum·m + (1 - dampening)·g``, then ``w -= lr·m``, or ``w -= lr·(g + momentum·m)`` with
    Nesterov's momentum. In MXNet's, ``m = momentum·m + lr·g``, then ``w -= m``, or ``w -= lr·g + momentum·m``. Without
    momentum it is torch's SGD of coalesced sparse gradients, to the bit. Of others torch subtracts what an id has
    several times one by one; here it is summed first, since workers, or positions of a batch, may have rows of one id.
    """

    scratches = False

    def states(self, settings: Mapping[str, Any], dtype: str) -> dict[str, RowState]:
        """See ``RowRule``."""
        return {"momentum_buffer": RowState(None, dtype)} if settings["momentum"] else {}

    def reads_only(self, settings: Mapping[str, Any]) -> bool:
        """See ``RowRule``."""
        if settings["maximize"] or settings["weight_decay"]:
            return False
        return not settings["momentum"] or not (settings["nesterov"] or settings.get("momentum_style") == "mxnet")

    def step(
        self,
        rows: torch.Tensor,
        grads: torch.Tensor,
        states: Mapping[str, torch.Tensor],
        settings: Mapping[str, Any],
        count: int,
        scratch: torch.Tensor,
    ) -> None:
        """See ``RowRule``."""
        prepare(rows, grads, settings)
        lr, momentum = settings["lr"], settings["momentum"]
        if not momentum:
            rows.add_(grads, alpha=-lr)
            return
        if settings.get("momentum_style") == "mxnet":
            grads.mul_(lr)
            lr = 1.0
        buffer = states["momentum_buffer"]
        # As in torch, the first update is not dampened.
        buffer.mul_(momentum).add_(grads, alpha=1 - settings["dampening"] if count > 1 else 1)
        step = grads.add_(buffer, alpha=momentum) if settings["nesterov"] else buffer
        rows.add_(step, alpha=-lr)
