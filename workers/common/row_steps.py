"""What a store's trainer and the modules whose tables it has tell each other, though neither knows the other."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from kvstore import KVStore


class RowPushes(Protocol):
    """What pushes the gradients of tables, beside a trainer."""

    def paused(self) -> AbstractContextManager[None]:
        """Push nothing in this block; gradients add up."""

    def step_over(self) -> None:
        """Handle the end of a step: push what has not been pushed in it, of each table once."""

    def drop(self) -> None:
        """Drop the gradients that have not been pushed."""


class RowSteps:
    """The trainer and the tables of one store.

    Attributes:
        rates: what sends the trainer's current hyper-parameters to the store; None without a trainer.
        pushes: what pushes the tables' gradients; None without tables.
        scale: the factor of gradients in the trainer's step that is under way, or was the last one.
    """

    def __init__(self, store: KVStore) -> None:
        self._store = store  # as long as this is in ``_known``, no other store has its id
        self.rates: Callable[[], object] | None = None
        self.pushes: RowPushes | None = None
        self.scale: float | None = None
        self._trainer: weakref.ref[HasGradients] | None = None

    def begin(self, trainer: HasGradients) -> None:
        """Let the steps of ``trainer``, as long as it lives, push the gradients of tables."""
        self._trainer = weakref.ref(trainer)

    @property
    def trainer(self) -> HasGradients | None:
        """The trainer of the store, or whose tables are in it; None if backward passes push."""
        return None if self._trainer is None else self._trainer()

    def apply_rates(self) -> None:
        """Send the trainer's current hyper-parameters to the store."""
        if self.rates is not None:
            self.rates()

    def paused(self) -> AbstractContextManager[None]:
        """Push no gradients of tables in this block."""
        return nullcontext() if self.pushes is None else self.pushes.paused()

    def step_over(self) -> None:
        """Note the end of a step of the trainer."""
        if self.pushes is not None:
            self.pushes.step_over()

    def drop(self) -> None:
        """Drop the gradients of tables that have not been pushed."""
        if self.pushes is not None:
            self.pushes.drop()


class HasGradients(Protocol):
    """A trainer, as tables see it."""

    def has_gradients(self) -> bool:
        """Whether a parameter has a gradient."""


_known: weakref.WeakValueDictionary[int, RowSteps] = weakref.WeakValueDictionary()


def row_steps(store: KVStore) -> RowSteps:
    """Return what all who train with ``store`` share; it lives as long as one of them has it."""
    steps = _known.get(id(store))
    if steps is None:
        steps = _known[id(store)] = RowSteps(store)
    return steps
