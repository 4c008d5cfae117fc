"""Metrics: how good predictions are, as sums that add up over batches, devices and workers; after MXNet's ``metric``.

metric = metrics.create(["acc", metrics.TopKAccuracy(top_k=5)])
metric.update(labels, outputs)
metric.get()                    # (['accuracy', 'top_k_accuracy_5'], [0.52, 0.93])

A metric is a sum and a count, and its value is their quotient. Sums and counts of all workers are added first, so the
metric is exact however uneven their shares are. Sums stay on the device until the value is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.nn import functional

from kvstore import Mismatch, UnknownName, UsageError
from kvstore.errors import meant
from workers.common.checks import at_least
from workers.common.tensors import to_tensor

SPREAD = 8.0  # of AUC's bins: half of them are for scores between -8 and 8


class Sums(Protocol):
    """What metrics need of a ``Reducer``: sums over all workers."""

    def sum(self, numbers: Mapping[str, float]) -> Mapping[str, float]: ...


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
        """Add a batch: its ``labels`` and predictions ``preds``, or lists with one item for each device.

        Raises:
            Mismatch: the shapes or numbers of labels and predictions do not match.
        """
        for label, pred in _pairs(labels, preds):
            total, count = self.measure(label, pred)
            if isinstance(total, torch.Tensor):
                total = total.double()  # sums over an epoch exceed what float32 counts exactly, 16.8 million
                if isinstance(self.sum_metric, torch.Tensor):
                    total = total.to(self.sum_metric.device)  # of several devices: no sum is of two
            self.sum_metric = self.sum_metric + total
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
        return self.name, self.value(self.sum_metric, self.num_inst)

    def get_global(self) -> tuple[Any, Any]:
        """Return the name, and the value since the last ``reset``."""
        return self.name, self.value(self._earlier[0] + self.sum_metric, self._earlier[1] + self.num_inst)

    def value(self, total: torch.Tensor | float, count: float) -> float:
        """Return the value for a sum, ``total``, and a ``count``: their quotient; NaN without instances."""
        return float(total) / count if count else float("nan")

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


def _zipped(names: Any, values: Any) -> list[tuple[str, float]]:
    return list(zip(names, values, strict=True)) if isinstance(names, list) else [(names, values)]


class Loss(EvalMetric):
    """The mean of the losses; in ``fit``, of the training loss.

    Args:
        name: the name that is printed.
    """

    output = "loss"

    def __init__(self, name: str = "loss") -> None:
        super().__init__(name)

    @torch.no_grad()
    def update(self, labels: Any, preds: Any) -> None:
        for pred in preds if isinstance(preds, list | tuple) else [preds]:
            losses = to_tensor(pred)
            self.sum_metric = self.sum_metric + losses.double().sum()
            self.num_inst += losses.numel()


class CustomMetric(EvalMetric):
    """The mean of a function's values over batches, or the quotient of its sums and counts.

    Args:
        feval: a function from a batch's labels and predictions to a number, or to a sum and a count.
        name: the name that is printed; None for ``custom(...)`` with the name of the function.
    """

    def __init__(self, feval: Callable[[torch.Tensor, torch.Tensor], Any], name: str | None = None) -> None:
        self._feval = feval
        super().__init__(name or f"custom({getattr(feval, '__name__', type(feval).__name__)})")

    def measure(self, label: torch.Tensor, pred: torch.Tensor) -> tuple[torch.Tensor | float, int]:
        value = self._feval(label, pred)
        return value if isinstance(value, tuple) else (value, 1)


class Accuracy(EvalMetric):
    """The fraction of instances whose predicted class is right.

    Predictions are scores of classes along ``axis``, or classes, in the shape of the labels.

    Args:
        axis: the axis of the predictions that counts classes.
        name: the name that is printed.
    """

    def __init__(self, axis: int = 1, name: str = "accuracy") -> None:
        self.axis = axis
        super().__init__(name)

    def measure(self, label: torch.Tensor, pred: torch.Tensor) -> tuple[torch.Tensor | float, int]:
        if pred.shape != label.shape and pred.dim() > self.axis:
            pred = pred.argmax(self.axis)
        _require(pred.numel() == label.numel(), label, pred)
        return (pred.reshape(-1).long() == label.reshape(-1).long()).sum(), label.numel()


class TopKAccuracy(EvalMetric):
    """The fraction of instances whose class is among the ``top_k`` with the highest scores (N x classes).

    Args:
        top_k: how many classes count as a hit, at least 2.
        name: the beginning of the name that is printed; ``_`` and ``top_k`` follow.

    Raises:
        UsageError: ``top_k`` is less than 2: use ``Accuracy``.
    """

    def __init__(self, top_k: int = 1, name: str = "top_k_accuracy") -> None:
        if isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 2:
            raise UsageError(f"top_k={top_k!r} must be an integer of at least 2; for 1 use Accuracy")
        self.top_k = top_k
        super().__init__(f"{name}_{top_k}")

    def measure(self, label: torch.Tensor, pred: torch.Tensor) -> tuple[torch.Tensor | float, int]:
        _require(pred.dim() == 2 and len(pred) == label.numel(), label, pred)
        best = pred.topk(min(self.top_k, pred.shape[1])).indices
        return (best == label.reshape(-1, 1)).sum(), len(pred)


class CrossEntropy(EvalMetric):
    """The mean cross entropy of the labels' classes, from scores before a softmax (N x C x ...).

    Args:
        probabilities: predictions are probabilities (N x C), as in MXNet; ``eps`` is added to them.
        eps: what is added to probabilities, so that 0 has a logarithm.
        name: the name that is printed.
    """

    def __init__(self, probabilities: bool = False, eps: float = 1e-12, name: str = "cross-entropy") -> None:
        self.probabilities, self.eps = probabilities, eps
        super().__init__(name)

    def measure(self, label: torch.Tensor, pred: torch.Tensor) -> tuple[torch.Tensor | float, int]:
        label = label.long()
        _require(pred.dim() > 1 and pred[:, 0].shape == label.shape, label, pred)
        if self.probabilities:
            pred = (pred.double() + self.eps).log()
            return functional.nll_loss(pred, label, reduction="sum"), label.numel()
        return functional.cross_entropy(pred.float(), label, reduction="sum"), label.numel()


class AUC(EvalMetric):
    """The area under the ROC curve: how often a positive instance has a higher score than a negative one.

    Scores are counted in bins, for positives and negatives, so that counts of batches and workers add up, and the
    memory does not grow. Two scores in one bin count as equal. With 4,096 bins, the values of a million scores differed
    by less than 1e-5 from those without bins where their standard deviation was 1 or more, and by 1e-4 where it was
    0.05.

    Labels are positive if they are above 0. Predictions are a score for each label before the sigmoid, in any shape, or
    scores of two classes (N x 2). NaN among them makes the metric NaN. So does a lack of positives or of negatives.

    Args:
        probabilities: predictions are probabilities, from 0 to 1.
        bins: how many there are; they are narrowest where scores before the sigmoid are near 0.
        name: the name that is printed.

    Raises:
        UsageError: there are fewer than 2 bins.
    """

    def __init__(self, probabilities: bool = False, bins: int = 4096, name: str = "auc") -> None:
        self.probabilities, self.bins = probabilities, at_least("bins", bins, 2, 1 << 20)
        super().__init__(name)

    def measure(self, label: torch.Tensor, pred: torch.Tensor) -> tuple[torch.Tensor | float, int]:
        pred = pred.double()
        if self.probabilities:
            pred = pred.logit()
        if pred.shape == (label.numel(), 2):
            pred = pred[:, 1] if self.probabilities else pred[:, 1] - pred[:, 0]
        _require(pred.numel() == label.numel(), label, pred)
        scores = pred.reshape(-1)
        # From any score to -1 to 1, so that bins need no bounds, and any scale has many of them.
        places = scores.clamp(-1e30, 1e30) / (SPREAD + scores.abs().clamp(max=1e30))
        places = ((places + 1) * (self.bins / 2)).nan_to_num(0).long().clamp(0, self.bins - 1)
        places = places.where(~scores.isnan(), self.bins) + (label.reshape(-1) > 0) * (self.bins + 1)
        counts = torch.zeros(2 * self.bins + 2, dtype=torch.float64, device=pred.device)
        return counts.index_add_(0, places, torch.ones_like(scores)), label.numel()

    def value(self, total: torch.Tensor | float, count: float) -> float:
        if not count:
            return float("nan")
        negative, positive = torch.as_tensor(total, dtype=torch.float64, device="cpu").view(2, -1)
        pairs = negative[:-1].sum() * positive[:-1].sum()
        if negative[-1] or positive[-1] or not pairs:
            return float("nan")
        below = negative[:-1].cumsum(0) - negative[:-1] / 2
        return float((positive[:-1] * below).sum() / pairs)

    def totals(self) -> dict[str, float]:
        total = torch.as_tensor(self._earlier[0] + self.sum_metric, dtype=torch.float64, device="cpu")
        return {str(place): count for place, count in enumerate(total.expand(2 * self.bins + 2).tolist())}

    def load_totals(self, totals: Mapping[str, float]) -> None:
        counts = [float(totals[str(place)]) for place in range(2 * self.bins + 2)]
        self.reset()
        self.sum_metric, self.num_inst = torch.tensor(counts, dtype=torch.float64, device="cpu"), sum(counts)


def _require(fits: bool, label: torch.Tensor, pred: torch.Tensor) -> None:
    if not fits:
        raise Mismatch(f"labels of shape {list(label.shape)} do not match predictions of shape {list(pred.shape)}")


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
        for metric in self.metrics:
            metric.update(labels, preds)

    def update_dict(self, labels: Mapping[str, Any], preds: Mapping[str, Any]) -> None:
        for metric in self.metrics:
            metric.update_dict(labels, preds)

    def reset(self) -> None:
        for metric in self.metrics:
            metric.reset()

    def reset_local(self) -> None:
        for metric in self.metrics:
            metric.reset_local()

    def get(self) -> tuple[list[str], list[float]]:
        return _unzipped([pair for metric in self.metrics for pair in metric.get_name_value()])

    def get_global(self) -> tuple[list[str], list[float]]:
        return _unzipped([pair for metric in self.metrics for pair in metric.get_global_name_value()])

    def totals(self) -> dict[str, float]:
        return {
            f"{number}/{name}": value
            for number, metric in enumerate(self.metrics)
            for name, value in metric.totals().items()
        }

    def load_totals(self, totals: Mapping[str, float]) -> None:
        for number, metric in enumerate(self.metrics):
            mine = f"{number}/"
            metric.load_totals(
                {name.removeprefix(mine): value for name, value in totals.items() if name.startswith(mine)}
            )


_NAMES: dict[str, Callable[..., EvalMetric]] = {
    "acc": Accuracy,
    "auc": AUC,
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
        metric: a name (``acc``, ``auc``, ``top_k_accuracy`` with ``top_k=5``, ``ce``, ``loss``), a metric, a function
            (see ``CustomMetric``), or a list of these.
        options: options of the class that the name stands for.

    Raises:
        UnknownName: there is no such metric. The message lists the valid ones.
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


__all__ = [
    "AUC",
    "Accuracy",
    "CompositeEvalMetric",
    "CrossEntropy",
    "CustomMetric",
    "EvalMetric",
    "Loss",
    "TopKAccuracy",
    "create",
]


def __dir__() -> list[str]:
    return list(__all__)
