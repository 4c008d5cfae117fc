"""The calls of a store that are about the optimizer that servers update with."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from kvstore.client.checkpointing import Checkpointing
from kvstore.client.momentum import advice, warn
from kvstore.client.optimizer import Optimizing, described
from kvstore.client.plans.entries import Entries
from kvstore.client.store_calls import StoreCalls
from kvstore.client.trained import TrainedStore
from kvstore.errors import Unsupported
from kvstore.optim import states_file
from kvstore.rule import Rule
from kvstore.spec import Key
from kvstore.store.optimizer_interface import OptimizerInterface


class UpdateCalls(StoreCalls, OptimizerInterface):
    """Has these calls; what they need is a ``DistStore``'s."""

    rule: Rule
    _checkpoints: Checkpointing | None
    _entries: Entries
    _optimizing: Optimizing
    _trained: TrainedStore

    def set_optimizer(self, optimizer: Any, **hyperparameters: Any) -> None:
        """See ``KVStore``."""
        self._check()
        new = described(optimizer, hyperparameters, self._entries)
        self._pushes.flush()  # what was pushed before is updated as before
        self._optimizing.set(new)
        if self._checkpoints is not None:
            self._trained.optimizer_set()
            if self.rank == 0:
                self._checkpoints.give_states(self._trained, self._entries)
        if self.rank == 0 and (text := advice(new, self.rule, self._name, self.num_workers)):
            warn(text)

    def set_updater(self, updater: Callable[[Key, Any, Any], None]) -> None:
        """Raise ``Unsupported``: an updater is code, and nothing on the wire is code."""
        raise Unsupported("servers take no function; use set_optimizer with a name and numbers")

    @property
    def learning_rate(self) -> float:
        """See ``KVStore``."""
        return self._optimizing.learning_rate

    def set_hyperparameters(
        self,
        *,
        learning_rate: float | None = None,
        rescale_grad: float | None = None,
        groups: Sequence[Mapping[str, Any]] = (),
        **others: Any,
    ) -> None:
        """See ``KVStore``."""
        self._check()
        self._optimizing.change(learning_rate, rescale_grad, groups, others)

    @property
    def rescale_grad(self) -> float:
        """See ``KVStore``."""
        return self._optimizing.rescale_grad

    def rescaled(self, factor: float) -> AbstractContextManager[None]:
        """See ``KVStore``."""
        self._check()
        return self._optimizing.rescaled(factor)

    def save_optimizer_states(self, path: str | os.PathLike[str], *, note: str | None = None) -> None:
        """See ``KVStore``."""
        self._check()
        self._pushes.flush()
        squeezed = self._pushes.compressing
        residuals = None if squeezed is None else states_file.Residuals(self.rank, *squeezed.state())
        self._optimizing.save(path, self._entries, residuals, note)

    def load_optimizer_states(self, path: str | os.PathLike[str]) -> None:
        """See ``KVStore``."""
        self._check()
        if self._pushes.compressing is not None:
            residuals = states_file.read_residuals(path)
            if residuals is not None and residuals.rank == self.rank:
                self._pushes.flush()
                tables = self._entries.tables
                shapes = {key: entry.spec.shape for key, entry in self._entries.items() if key not in tables}
                self._pushes.compressing.load_state(residuals.tensors, residuals.plain, shapes)
        if self.rank != 0:
            return
        self._pushes.flush()
        self._optimizing.load(path, self._entries)
