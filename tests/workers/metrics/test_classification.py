"""Metrics of predicted classes: their values and names, as MXNet prints them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import kvstore as kv
from workers import metrics

PROBABILITIES = torch.tensor([[0.3, 0.7], [0.0, 1.0], [0.4, 0.6]])
LABELS = torch.tensor([0, 1, 1])


def test_accuracy_as_in_mxnets_example() -> None:
    metric = metrics.create("acc")
    metric.update(labels=LABELS, preds=PROBABILITIES)
    assert metric.get() == ("accuracy", 2 / 3)
    assert str(metric) == "EvalMetric: {'accuracy': 0.6666666666666666}"


def test_accuracy_of_classes_of_lists_and_of_arrays() -> None:
    metric = metrics.Accuracy()
    metric.update([LABELS, LABELS], [torch.tensor([0, 1, 0]), torch.tensor([0.0, 1.0, 1.0])])
    metric.update(np.array([1]), np.array([[0.5, 0.25]]))
    assert metric.totals() == {"sum": 5.0, "count": 7.0}


def test_accuracy_of_every_pixel() -> None:
    metric = metrics.Accuracy()
    scores = torch.zeros(2, 3, 4, 5)
    scores[:, 1] = 1
    labels = torch.ones(2, 4, 5)
    labels[0, 0, 0] = 2
    metric.update(labels, scores)
    assert metric.totals() == {"sum": 39.0, "count": 40.0}


def test_top_k_accuracy() -> None:
    metric = metrics.create("top_k_accuracy", top_k=2)
    metric.update(torch.tensor([2, 0, 1]), torch.tensor([[0.1, 0.2, 0.3], [0.1, 0.2, 0.3], [0.1, 0.2, 0.3]]))
    assert metric.get() == ("top_k_accuracy_2", 2 / 3)
    assert metrics.create("top_k_acc", top_k=5).name == "top_k_accuracy_5"


def test_more_than_all_classes_is_all() -> None:
    metric = metrics.TopKAccuracy(top_k=5)
    metric.update(LABELS, PROBABILITIES)
    assert metric.get()[1] == 1.0


def test_cross_entropy_of_scores_and_as_in_mxnets_example_of_probabilities() -> None:
    scores = torch.randn(7, 4, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(7) % 4
    metric = metrics.create("ce")
    metric.update(labels, scores)
    name, value = metric.get()
    assert name == "cross-entropy"
    assert value == pytest.approx(float(torch.nn.functional.cross_entropy(scores, labels)), rel=1e-6)
    metric = metrics.create("cross-entropy", probabilities=True)
    metric.update(LABELS, PROBABILITIES)
    assert metric.get()[1] == pytest.approx(0.57159948348999023)


def test_what_does_not_fit_is_an_error_that_shows_the_shapes() -> None:
    with pytest.raises(kv.Mismatch, match=r"labels of shape \[2\] do not match predictions of shape \[3\]"):
        metrics.Accuracy().update(LABELS[:2], PROBABILITIES)
    with pytest.raises(kv.Mismatch, match="labels of shape"):
        metrics.TopKAccuracy(top_k=2).update(LABELS, LABELS)
    with pytest.raises(kv.Mismatch, match="labels of shape"):
        metrics.CrossEntropy().update(LABELS, LABELS)
    with pytest.raises(kv.Mismatch, match="1 arrays of labels, but 2 of predictions"):
        metrics.Accuracy().update(LABELS, [PROBABILITIES, PROBABILITIES])
