"""A metric: a sum and a count, of a batch, a worker or all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch

from kvstore import Mismatch
from workers.common.tensors import to_tensor


class Sums(Protocol):
    """What metrics need of a ``Reducer``: sums over all workers."""

    def sum(self, numbers: Mapping[str, float]) -> Mapping[str, float]:
        """Return each number's sum over workers."""
        ...


class EvalMetric:
    """A metric. Subclasses define ``measure``, or, as in MXNet, ``update``, which adds to the attributes.

    Args:
        name: the name that is printed.

    Attributes:
        sum_metric: the sum since the last reset; a tensor may stay on its device.
        num_inst: the number of instances in the sum.
    """

    _earlier: tuple[torch.Tensor | float, float]
    sum_metric: torch.Tensor | float
    num_inst: float
    output = "output"  # what is measured: the model's "output", or the "loss" of each sample

    def __init__(self, name: str) -> None:
        self.name = name
        self.reset()

    def measure(self, label: torch.Tensor, pred: torch.Tensor) -> tuple[torch.Tensor | float, int]:
        """Return the sum over a batch's instances, by ``label`` and ``pred``, and their number."""
        raise NotImplementedError(f"{type(self).__name__} defines neither measure nor update")

    @torch.no_grad()
    def update(self, labels: Any, preds: Any) -> None:
        """Add a batch: its ``labels`` and predictions ``preds``, or lists with those of each device.

        Raises:
            Mismatch: the shapes or numbers of labels and predictions do not match.
        """
        for label, pred in _pairs(labels, preds):
            total, count = self.measure(label, pred)
            self.sum_metric = self.sum_metric + (total.double() if isinstance(total, torch.Tensor) else total)
            self.num_inst += count

    def update_dict(self, labels: Mapping[str, Any], preds: Mapping[str, Any]) -> None:
        """Add a batch: of ``labels`` the item ``label``, of ``preds`` the item that the attribute ``output`` names."""
        self.update(labels["label"], preds[self.output])

    def reset(self) -> None:
        """Set sum and count to zero."""
        self._earlier = (0.0, 0)
        self.sum_metric, self.num_inst = 0.0, 0

    def reset_local(self) -> None:
        """Reset what ``get`` returns, but not ``get_global``."""
        self._earlier = (self._earlier[0] + self.sum_metric, self._earlier[1] + self.num_inst)
        self.sum_metric, self.num_inst = 0.0, 0

    def get(self) -> tuple[Any, Any]:
        """Return the name, and the value since the last ``reset`` or ``reset_local``; NaN if there is none."""
        return self.name, _quotient(self.sum_metric, self.num_inst)

    def get_global(self) -> tuple[Any, Any]:
        """Return the name, and the value since the last ``reset``."""
        return self.name, _quotient(self._earlier[0] + self.sum_metric, self._earlier[1] + self.num_inst)

    def get_name_value(self) -> list[tuple[str, float]]:
        """Return the result of ``get`` as pairs."""
        return _zipped(*self.get())

    def get_global_name_value(self) -> list[tuple[str, float]]:
        """Return the result of ``get_global`` as pairs."""
        return _zipped(*self.get_global())

    def totals(self) -> dict[str, float]:
        """Return the sum and the count since the last ``reset``."""
        return {
            "sum": float(self._earlier[0] + self.sum_metric),
            "count": float(self._earlier[1] + self.num_inst),
        }

    def load_totals(self, totals: Mapping[str, float]) -> None:
        """Replace sum and count by what ``totals`` returned."""
        total, count = float(totals["sum"]), float(totals["count"])
        self.reset()
        self.sum_metric, self.num_inst = total, count

    def reduce(self, reducer: Sums) -> None:
        """Add up sums and counts of all workers since the last ``reset``, by a ``reducer``. All workers call this."""
        self.load_totals(reducer.sum(self.totals()))

    def __str__(self) -> str:
        return f"EvalMetric: {dict(self.get_name_value())}"


def _pairs(labels: Any, preds: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    listed = [list(arrays) if isinstance(arrays, list | tuple) else [arrays] for arrays in (labels, preds)]
    if len(listed[0]) != len(listed[1]):
        raise Mismatch(
            f"{len(listed[0])} arrays of labels, but {len(listed[1])} of predictions: give one of each per device"
        )
    for label, pred in zip(*listed, strict=True):
        pred = to_tensor(pred)
        yield to_tensor(label).to(pred.device), pred


def _quotient(total: torch.Tensor | float, count: float) -> float:
    return float(total) / count if count else float("nan")


def _zipped(names: Any, values: Any) -> list[tuple[str, float]]:
    return list(zip(names, values, strict=True)) if isinstance(names, list) else [(names, values)]
