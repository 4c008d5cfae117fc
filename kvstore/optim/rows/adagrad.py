"""Adagrad of rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kvstore.optim.rows.rule import RowRule, RowState, prepare


class AdagradRows(RowRule):
    """Adagrad, without decay to the bit as torch computes it of sparse gradients.

    ``s += g²``, then ``w -= lr/(1 + (t - 1)·lr_decay)·g/(√s + eps)``, where ``t`` counts the table's updates.
    """

    def states(self, settings: Mapping[str, Any], dtype: str) -> dict[str, RowState]:
        """See ``RowRule``."""
        return {"sum": RowState(None, dtype, settings["initial_accumulator_value"])}

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
        states["sum"].add_(torch.mul(grads, grads, out=scratch))
        grads.div_(torch.sqrt(states["sum"], out=scratch).add_(settings["eps"]))
        rows.add_(grads, alpha=-settings["lr"] / (1 + (count - 1) * settings["lr_decay"]))
