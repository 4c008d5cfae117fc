"""Metrics: how good predictions are, as sums that add up over batches, devices and workers; after MXNet's ``metric``.

metric          ``EvalMetric``: a sum and a count, of a batch, a worker or all of them
classification  how often predicted classes are right
means           of losses, and of what a function returns
composite       several metrics together; ``create``

metric = metrics.create(["acc", metrics.TopKAccuracy(top_k=5)])
metric.update(labels, outputs)
metric.get()                    # (['accuracy', 'top_k_accuracy_5'], [0.52, 0.93])

A metric is a sum and a count, and its value is their quotient. Sums and counts of all workers are added first, so the
metric is exact however uneven their shares are. Sums stay on the device until the value is asked for.
"""

from workers.metrics.classification import Accuracy, CrossEntropy, TopKAccuracy
from workers.metrics.composite import CompositeEvalMetric, create
from workers.metrics.means import CustomMetric, Loss
from workers.metrics.metric import EvalMetric

__all__ = [
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
