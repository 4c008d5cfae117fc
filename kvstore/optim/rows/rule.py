"""A rule: how the gradients of some rows of a table change these rows, and what is kept of each row."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch


class RowState(NamedTuple):
    """What an optimizer keeps of each row, under one name.

    Attributes:
        columns: how many numbers; None: as many as the row has elements.
        dtype: of the numbers.
        initial: what they are before the row's first update.
    """

    columns: int | None
    dtype: str
    initial: float = 0.0


class RowRule(ABC):
    """A formula for rows of any number. What it gives for one row does not depend on the others.

    A rule has no memory of its own: what a row's next update needs is in the row's states, and the count of updates is
    the table's.

    Attributes:
        scratches: whether ``step`` uses its scratch memory.
    """

    scratches: ClassVar[bool] = True

    @abstractmethod
    def states(self, settings: Mapping[str, Any], dtype: str) -> dict[str, RowState]:
        """Return what is kept of each row, by name.

        Args:
            settings: a param group of torch's optimizer: hyper-parameters by torch's names.
            dtype: of the rows.
        """

    def reads_only(self, settings: Mapping[str, Any]) -> bool:
        """Return whether ``step`` leaves gradients as they are."""
        return False

    @abstractmethod
    def step(
        self,
        rows: torch.Tensor,
        grads: torch.Tensor,
        states: Mapping[str, torch.Tensor],
        settings: Mapping[str, Any],
        count: int,
        scratch: torch.Tensor,
    ) -> None:
        """Update rows and states in place.

        Args:
            rows: of shape (n, width).
            grads: of the same shape; overwritten.
            states: by the names of ``states``, each of shape (n, columns).
            settings: see ``states``.
            count: the number of this update of the table, from 1.
            scratch: of the shape of ``rows``, if ``scratches``; overwritten.
        """


def prepare(rows: torch.Tensor, grads: torch.Tensor, settings: Mapping[str, Any]) -> None:
    """Turn gradients round if the loss is to grow, and add the decay of the rows; in place."""
    if settings["maximize"]:
        grads.neg_()
    if settings["weight_decay"]:
        grads.add_(rows, alpha=settings["weight_decay"])
