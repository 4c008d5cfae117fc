"""The step of an optimizer on rows of one table: gradients change rows that have been gathered."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch

from kvstore.optim.optimizer import Changes, Optimizer, require_rule
from kvstore.optim.param_groups import ParamGroups
from kvstore.optim.rows.row_rules import RowRule, RowState
from kvstore.spec import Key

BLOCK = 1 << 18  # elements: rows are updated in blocks, so that scratch memory is small and stays in the cache

NO_CHANGES: Changes = MappingProxyType({})


class RowHyperparameters(NamedTuple):
    """What an update uses in place of the optimizer's own; None, or no change: the optimizer's own.

    Attributes:
        lr: the learning rate of tables whose group has none of its own.
        rescale: what gradients are multiplied by first.
        changes: see ``Optimizer.changes``.
    """

    lr: float | None = None
    rescale: float | None = None
    changes: Changes = NO_CHANGES


OWN = RowHyperparameters()


class RowUpdater:
    """Updates rows of one table.

    Args:
        optimizer: what to do.
        key: of the table, by which ``optimizer`` knows it.
        dtype: of the table.
        width: how many elements a row has.
        grows: whether the table grows.

    Attributes:
        rule: what states must have in common to be those of this updater.
        states: what is kept of each row, by name. Updaters of one rule may differ in it: without momentum, there is no
            ``momentum_buffer``.
        lazy: whether rows stay as they are that have no gradient. If not, each step must be given all rows of the
            table, with gradients of 0 where nothing was pushed.

    Raises:
        UsageError: the optimizer has no rule for rows of such a table.
        ValueError: torch refuses the hyper-parameters (a negative learning rate, say).
    """

    def __init__(self, optimizer: Optimizer, key: Key, dtype: str, width: int, grows: bool) -> None:
        require_rule(optimizer, key, grows)
        self._rule: RowRule = optimizer.found.rows  # type: ignore[assignment]
        self._optimizer = optimizer
        self._groups = ParamGroups(optimizer)
        (self._rates,) = self._groups.rates([key])
        self._width = width
        self._scratch = self._kept = torch.empty(0, dtype=getattr(torch, dtype), device="cpu")
        self._use(OWN)
        self.rule = optimizer.rule
        self.states: Mapping[str, RowState] = self._rule.states(self._settings, dtype)
        self.lazy = optimizer.lazy(self._rates.group)

    def steps_as(self, other: RowUpdater) -> bool:
        """Whether rows of the other's table may be in one step with those of this one's, which are as wide."""
        return self._optimizer is other._optimizer and self._rates == other._rates and self.lazy == other.lazy

    def empty_states(self, count: int) -> dict[str, np.ndarray[Any, np.dtype[Any]]]:
        """Return memory for the states of ``count`` rows, by name, each of shape (count, columns)."""
        return {
            name: np.empty((count, self._width if state.columns is None else state.columns), state.dtype)
            for name, state in self.states.items()
        }

    def step(
        self,
        count: int,
        rows: torch.Tensor,
        grads: torch.Tensor,
        states: Mapping[str, torch.Tensor],
        hyper: RowHyperparameters = OWN,
        keep: bool = False,
    ) -> None:
        """Update rows and their states in place.

        Args:
            count: the number of this update of the table, from 1; updates without rows count, too.
            rows: of shape (n, width), contiguous.
            grads: of the same shape and dtype; overwritten.
            states: of these rows, by the names of ``states``, each of shape (n, columns).
            hyper: of this update.
            keep: whether the gradients must stay as they are.
        """
        if hyper is not self._hyper and hyper != self._hyper:
            self._use(hyper)
        number = rows.shape[0]
        if not number:
            return
        blocks = max(1, round(number * self._width / BLOCK))  # so that none has only a few rows
        block = -(-number // blocks)
        if self._rule.scratches and self._scratch.numel() < block * self._width:
            self._scratch = torch.empty(block * self._width, dtype=rows.dtype, device="cpu")
        keep = keep and not self._reads_only
        if keep and self._kept.numel() < block * self._width:
            self._kept = torch.empty(block * self._width, dtype=rows.dtype, device="cpu")
        if blocks == 1:
            self._update(count, rows, grads, states, keep)
            return
        for start in range(0, number, block):
            part = slice(start, min(start + block, number))
            own = {name: states[name][part] for name in self.states}
            self._update(count, rows[part], grads[part], own, keep)

    def _update(
        self,
        count: int,
        rows: torch.Tensor,
        grads: torch.Tensor,
        states: Mapping[str, torch.Tensor],
        keep: bool,
    ) -> None:
        if keep:
            grads = torch.mul(grads, self._rescale, out=self._kept[: grads.numel()].view(grads.shape))
        elif self._rescale != 1.0:
            grads.mul_(self._rescale)
        if (bound := self._optimizer.clip_gradient) is not None:
            grads.clamp_(-bound, bound)
        scratch = self._scratch[: rows.numel()].view(rows.shape) if self._rule.scratches else self._scratch
        self._rule.step(rows, grads, states, self._settings, count, scratch)

    def _use(self, hyper: RowHyperparameters) -> None:
        """Update with ``hyper`` from now on."""
        lr = self._optimizer.lr if hyper.lr is None else hyper.lr
        self._settings: dict[str, Any] = self._groups.settings(self._rates, lr, hyper.changes)
        self._hyper = hyper
        self._rescale = self._optimizer.rescale_grad if hyper.rescale is None else hyper.rescale
        # Whether gradients are left as they are.
        self._reads_only = (
            self._rescale == 1.0 and self._optimizer.clip_gradient is None and self._rule.reads_only(self._settings)
        )
