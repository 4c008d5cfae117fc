"""Adam of rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kvstore.optim.rows.rule import RowRule, RowState, prepare


@dataclass(frozen=True)
class AdamRows(RowRule):
    """Adam. Without decay it is torch's ``SparseAdam``, to the bit: the same operations, on gathered rows.

    The averages ``m`` and ``v`` of a row stay as they are while it has no gradient; their bias is corrected by the
    count of the table's updates. ``w -= lr·√(1 - beta2ᵗ)/(1 - beta1ᵗ)·m/(√v + eps)``. With decoupled decay it is AdamW,
    whose ``eps`` is added to the corrected root: ``w -= lr/(1 - beta1ᵗ)·m/(√(v/(1 - beta2ᵗ)) + eps)``.

    An update without rows counts. So it does in torch if there is a gradient that has no rows; torch leaves out what
    has no gradient. A server cannot tell the two apart, for the rows of a round may all be on other servers.

    Attributes:
        decoupled: whether decay is decoupled, where the hyper-parameters do not say.
    """

    decoupled: bool = False

    def states(self, settings: Mapping[str, Any], dtype: str) -> dict[str, RowState]:
        """See ``RowRule``."""
        names = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if settings["amsgrad"] else [])]
        return {name: RowState(None, dtype) for name in names}

    def reads_only(self, settings: Mapping[str, Any]) -> bool:
        """See ``RowRule``."""
        decays = settings["weight_decay"] and not settings.get("decoupled_weight_decay", self.decoupled)
        return not (settings["maximize"] or decays)

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
        mean, square, (beta1, beta2), lr = states["exp_avg"], states["exp_avg_sq"], settings["betas"], settings["lr"]
        decoupled = settings.get("decoupled_weight_decay", self.decoupled)
        if decoupled:
            rows.mul_(1 - lr * settings["weight_decay"])
            settings = {**settings, "weight_decay": 0}
        prepare(rows, grads, settings)
        torch.mul(grads, grads, out=scratch)
        square.add_(scratch.sub_(square).mul_(1 - beta2))
        mean.add_(torch.sub(grads, mean, out=scratch).mul_(1 - beta1))
        if settings["amsgrad"]:
            square = torch.maximum(states["max_exp_avg_sq"], square, out=states["max_exp_avg_sq"])
        first, root = 1 - beta1**count, math.sqrt(1 - beta2**count)
        torch.sqrt(square, out=scratch)
        if decoupled:
            scratch.div_(root)
            root = 1.0
        torch.div(mean, scratch.add_(settings["eps"]), out=scratch)
        rows.add_(scratch.mul_(-(lr * root / first)))
