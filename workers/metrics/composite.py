"""Several metrics together, and ``create``, which makes them and each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kvstore import UnknownName, UsageError
from kvstore.errors import meant
from workers.metrics.classification import Accuracy, CrossEntropy, TopKAccuracy
from workers.metrics.means import CustomMetric, Loss
from workers.metrics.metric import EvalMetric


class CompositeEvalMetric(EvalMetric):
    """Several metrics, updated together.

    Args:
        metrics: an argument of ``create`` for each metric.
        name: the name of all of them together.
    """

    def __init__(self, metrics: Iterable[Any] = (), name: str = "composite") -> None:
        self.metrics: list[EvalMetric] = [create(metric) for metric in metrics]
        super().__init__(name)

    def add(self, metric: Any) -> None:
        """Add ``metric``, which may be all that ``create`` takes."""
        self.metrics.append(create(metric))

    def get_metric(self, index: int) -> EvalMetric:
        """Return the metric with the number ``index``, from 0."""
        return self.metrics[index]

    def update(self, labels: Any, preds: Any) -> None:
        """See ``EvalMetric``."""
        for metric in self.metrics:
            metric.update(labels, preds)

    def update_dict(self, labels: Mapping[str, Any], preds: Mapping[str, Any]) -> None:
        """See ``EvalMetric``."""
        for metric in self.metrics:
            metric.update_dict(labels, preds)

    def reset(self) -> None:
        """See ``EvalMetric``."""
        for metric in self.metrics:
            metric.reset()

    def reset_local(self) -> None:
        """See ``EvalMetric``."""
        for metric in self.metrics:
            metric.reset_local()

    def get(self) -> tuple[list[str], list[float]]:
        """See ``EvalMetric``; the names and the values are lists."""
        return _unzipped([pair for metric in self.metrics for pair in metric.get_name_value()])

    def get_global(self) -> tuple[list[str], list[float]]:
        """See ``EvalMetric``; the names and the values are lists."""
        return _unzipped([pair for metric in self.metrics for pair in metric.get_global_name_value()])

    def totals(self) -> dict[str, float]:
        """See ``EvalMetric``."""
        return {
            f"{number}/{name}": value
            for number, metric in enumerate(self.metrics)
            for name, value in metric.totals().items()
        }

    def load_totals(self, totals: Mapping[str, float]) -> None:
        """See ``EvalMetric``."""
        for number, metric in enumerate(self.metrics):
            mine = f"{number}/"
            metric.load_totals(
                {name.removeprefix(mine): value for name, value in totals.items() if name.startswith(mine)}
            )


_NAMES: dict[str, Callable[..., EvalMetric]] = {
    "acc": Accuracy,
    "accuracy": Accuracy,
    "top_k_accuracy": TopKAccuracy,
    "top_k_acc": TopKAccuracy,
    "ce": CrossEntropy,
    "cross-entropy": CrossEntropy,
    "crossentropy": CrossEntropy,
    "loss": Loss,
    "composite": CompositeEvalMetric,
}


def create(metric: Any, **options: Any) -> EvalMetric:
    """Return a metric.

    Args:
        metric: a name (``acc``, ``top_k_accuracy`` with ``top_k=5``, ``ce``, ``loss``), a metric, a function (see
            ``CustomMetric``), or a list of these.
        options: options of the class that the name stands for.

    Raises:
        UnknownName: there is no such metric. The message lists those there are.
    """
    if isinstance(metric, EvalMetric):
        return metric
    if isinstance(metric, str):
        made = _NAMES.get(metric.lower())
        if made is None:
            raise UnknownName(f"no metric {metric!r}; choose from {', '.join(_NAMES)}{meant(metric.lower(), _NAMES)}")
        return made(**options)
    if callable(metric):
        return CustomMetric(metric, **options)
    if isinstance(metric, Sequence):
        return CompositeEvalMetric(metric, **options)
    raise UsageError(
        f"a metric must be a name, an EvalMetric, a function or a list of these, not {type(metric).__name__}"
    )


def _unzipped(pairs: list[tuple[str, float]]) -> tuple[list[str], list[float]]:
    return [name for name, _ in pairs], [value for _, value in pairs]
