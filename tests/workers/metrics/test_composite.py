"""Several metrics together, and metrics by name."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import kvstore as kv
from workers import metrics


def test_arrays_that_torch_has_not_are_taken_too() -> None:
    metric = metrics.create(["acc", "loss"])
    metric.update(np.array([1, 0], dtype=">i8"), np.array([[0.25, 0.5], [0.5, 0.25]], dtype=">f4"))
    metric.update(np.array([0, 1])[::-1], np.array([[0.5, 0.25], [0.25, 0.5]])[::-1])
    assert metric.get() == (["accuracy", "loss"], [1.0, 0.375])


def test_a_metric_written_for_mxnet() -> None:
    class Errors(metrics.EvalMetric):
        def update(self, labels: torch.Tensor, preds: torch.Tensor) -> None:
            self.sum_metric += float((labels - preds).abs().sum())
            self.num_inst += len(labels)

    metric = metrics.create([Errors("errors"), "acc"])
    metric.update(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]))
    metric.reset_local()
    metric.update(torch.tensor([1.0]), torch.tensor([1.0]))
    assert metric.get() == (["errors", "accuracy"], [0.0, 1.0])
    assert metric.get_global_name_value() == [("errors", 2 / 3), ("accuracy", 2 / 3)]


def test_wrong_names_list_what_there_is() -> None:
    with pytest.raises(kv.UnknownName, match=r"no metric 'f2'; choose from acc, accuracy, top_k_accuracy"):
        metrics.create("f2")
    with pytest.raises(kv.UsageError, match="top_k=1 must be an integer of at least 2"):
        metrics.create("top_k_accuracy")
    with pytest.raises(kv.UsageError, match="not int"):
        metrics.create(3)
