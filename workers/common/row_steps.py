"""What a store's trainer and the modules whose tables it has tell each other, though neither knows the other."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from kvstore import KVStore


class RowPushes:
    """What pushes the gradients of tables, beside a trainer. This one is of a store without tables: nothing."""

    def paused(self) -> AbstractContextManager[None]:
        """Push nothing in this block; gradients add up."""
        return nullcontext()

    def step_over(self) -> None:
        """Handle the end of a step: push what has not been pushed in it, of each table once."""

    def drop(self) -> None:
        """Drop the gradients that have not been pushed."""


class RowSteps:
    """The trainer and the tables of one store.

    Attributes:
        rates: what sends the trainer's current hyper-parameters to the store; None without a trainer.
        scale: the factor of gradients in the trainer's step that is under way, or was the last one.
    """

    def __init__(self, store: KVStore) -> None:
        self._store = store  # as long as this is in ``_known``, no other store has its id
        self.rates: Callable[[], object] | None = None
        self.pushes = RowPushes()
        self.scale: float | None = None
        self._has_gradients: weakref.WeakMethod[Callable[[], bool]] | None = None

    def begin(self, has_gradients: Callable[[], bool]) -> None:
        """Let the steps of a trainer, whose method this is, push the gradients of tables as long as it lives."""
        # Weak: tables outlive a trainer that the program has dropped, and backward passes push again then.
        self._has_gradients = weakref.WeakMethod(has_gradients)

    @property
    def trainer_has_gradients(self) -> Callable[[], bool] | None:
        """Whether a parameter of the store's trainer has a gradient; None if backward passes push."""
        return None if self._has_gradients is None else self._has_gradients()


_known: weakref.WeakValueDictionary[int, RowSteps] = weakref.WeakValueDictionary()


def row_steps(store: KVStore) -> RowSteps:
    """Return what the trainer and the tables of ``store`` share; it lives as long as one of them has it."""
    steps = _known.get(id(store))
    if steps is None:
        steps = _known[id(store)] = RowSteps(store)
    return steps
