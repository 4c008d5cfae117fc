"""Optimizers of ``kvstore.optim.algorithms`` for rows: their formulas for one tensor are applied to gathered rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvstore.cached import cached
from kvstore.optim.algorithms.tensorwise import Tensorwise
from kvstore.optim.rows.rule import RowRule, RowState


@dataclass(frozen=True)
class TensorwiseRows(RowRule):
    """The formula of an optimizer that updates each element, or each row of a matrix, by itself.

    Attributes:
        cls: the optimizer.
        wide: the names of states that are as wide as a row.
        narrow: the names of states that are one number for each row.
        initial: the hyper-parameter that says what the narrow states are at first; None: 0.
    """

    cls: type[Tensorwise]
    wide: Sequence[str] = ()
    narrow: Sequence[str] = ()
    initial: str | None = None

    def states(self, settings: Mapping[str, Any], dtype: str) -> dict[str, RowState]:
        """See ``RowRule``."""
        first = settings[self.initial] if self.initial else 0.0
        wide = {name: RowState(None, dtype) for name in self.wide}
        return wide | {name: RowState(1, dtype, first) for name in self.narrow}

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
        self._optimizer.update(
            rows, grads, {**states, "step": torch.tensor(count - 1.0, dtype=torch.float32, device="cpu")}, settings
        )

    @cached
    def _optimizer(self) -> Tensorwise:
        return self.cls([torch.zeros(1, 1, dtype=torch.float32, device="cpu")])
