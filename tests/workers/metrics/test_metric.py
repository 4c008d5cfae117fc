"""A metric: its values by batches, since resets, and over workers."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest
import torch

import kvstore as kv
from workers import metrics

LABELS = torch.tensor([0, 1, 1])


class Adding:
    """A reducer that adds what another worker has."""

    def __init__(self, other: metrics.EvalMetric) -> None:
        self.other = other.totals()

    def sum(self, numbers: Mapping[str, float]) -> dict[str, float]:
        return {name: value + self.other[name] for name, value in numbers.items()}


def test_local_values_begin_anew_and_global_ones_go_on() -> None:
    metric = metrics.create("acc")
    metric.update(LABELS, LABELS)
    metric.reset_local()
    assert math.isnan(metric.get()[1])
    metric.update(LABELS, 1 - LABELS)
    assert metric.get() == ("accuracy", 0.0)
    assert metric.get_global() == ("accuracy", 0.5)
    metric.reset_local()
    metric.update(LABELS, LABELS)
    assert metric.get_global() == ("accuracy", 2 / 3)
    metric.reset()
    assert math.isnan(metric.get_global()[1])


def test_counts_beyond_float32_stay_exact() -> None:
    metric = metrics.Accuracy()
    metric.load_totals({"sum": 2.0**24, "count": 2.0**24})
    metric.update(LABELS, LABELS)
    assert metric.totals() == {"sum": 2.0**24 + 3, "count": 2.0**24 + 3}


def test_workers_with_uneven_shares_have_the_metric_of_all() -> None:
    scores = torch.randn(10, 4, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(10) % 4
    whole, mine, other = (
        metrics.create(["acc", metrics.TopKAccuracy(top_k=2), lambda label, pred: 1.0]) for _ in "abc"
    )
    whole.update(labels, scores)
    whole.update(labels[:0], scores[:0])
    mine.update(labels[:9], scores[:9])
    other.update(labels[9:], scores[9:])
    mine.reset_local()  # as a Speedometer does
    mine.reduce(Adding(other))
    assert mine.get() == mine.get_global() == whole.get()


def test_a_worker_without_data_counts_for_nothing() -> None:
    mine, other = metrics.create("acc"), metrics.create("acc")
    other.update(LABELS, LABELS)
    mine.reduce(Adding(other))
    assert mine.get() == ("accuracy", 1.0)


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
