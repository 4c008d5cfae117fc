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


class RowSteps:
    """The trainer and the tables of one store.

    Attributes:
        rates: what sends the trainer's current hyper-parameters to the store; None without a trainer.
        pushes: what pushes the tables' gradients; None without tables.
    """

    def __init__(self, store: KVStore) -> None:
        self._store = store  # as long as this is in ``_known``, no other store has its id
        self.rates: Callable[[], object] | None = None
        self.pushes: RowPushes | None = None

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


_known: weakref.WeakValueDictionary[int, RowSteps] = weakref.WeakValueDictionary()


def row_steps(store: KVStore) -> RowSteps:
    """Return what all who train with ``store`` share; it lives as long as one of them has it."""
    steps = _known.get(id(store))
    if steps is None:
        steps = _known[id(store)] = RowSteps(store)
    return steps
