"""How often predicted classes are right, and how probable the right ones were."""

from __future__ import annotations

import torch
from torch.nn import functional

from kvstore import Mismatch, UsageError
from workers.metrics.metric import EvalMetric


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
        """See ``EvalMetric``."""
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
        """See ``EvalMetric``."""
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
        """See ``EvalMetric``."""
        label = label.long()
        _require(pred.dim() > 1 and pred[:, 0].shape == label.shape, label, pred)
        if self.probabilities:
            pred = (pred.double() + self.eps).log()
            return functional.nll_loss(pred, label, reduction="sum"), label.numel()
        return functional.cross_entropy(pred.float(), label, reduction="sum"), label.numel()


def _require(fits: bool, label: torch.Tensor, pred: torch.Tensor) -> None:
    if not fits:
        raise Mismatch(f"labels of shape {list(label.shape)} do not match predictions of shape {list(pred.shape)}")
