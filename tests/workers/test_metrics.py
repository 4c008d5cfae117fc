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
    with pytest.raises(kv.UnknownName, match=r"no metric 'f2'; choose from acc, auc, accuracy, top_k_accuracy"):
        metrics.create("f2")
    with pytest.raises(kv.UsageError, match="top_k=1 must be an integer of at least 2"):
        metrics.create("top_k_accuracy")
    with pytest.raises(kv.UsageError, match="not int"):
        metrics.create(3)


# ---- Means of losses, and of what a function returns

PROBABILITIES = torch.tensor([[0.3, 0.7], [0.0, 1.0], [0.4, 0.6]])


def test_loss_is_the_mean_over_samples() -> None:
    metric = metrics.create("loss")
    metric.update_dict({"label": LABELS}, {"output": PROBABILITIES, "loss": torch.tensor(2.0).expand(3)})
    metric.update_dict({"label": LABELS[:1]}, {"output": PROBABILITIES[:1], "loss": torch.tensor(6.0).expand(1)})
    assert metric.get() == ("loss", 3.0)


def test_a_function_is_a_metric() -> None:
    def error(label: torch.Tensor, pred: torch.Tensor) -> torch.Tensor:
        return (label - pred).abs().mean()

    metric = metrics.create(error)
    metric.update(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]))
    metric.update(torch.tensor([1.0]), torch.tensor([1.0]))
    assert metric.get() == ("custom(error)", 0.5)
    counted = metrics.create(lambda label, pred: (float((label - pred).abs().sum()), len(label)), name="mae")
    counted.update(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]))
    counted.update(torch.tensor([1.0]), torch.tensor([2.0]))
    assert counted.get() == ("mae", 1.0)


# ---- Metrics of predicted classes: their values and names, as MXNet prints them


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


def pairs_right(labels: torch.Tensor, scores: torch.Tensor) -> float:
    """The definition of AUC: how many pairs of a positive and a negative one are in order, equal ones by half."""
    positive, negative = scores[labels > 0][:, None], scores[labels <= 0]
    return float(((positive > negative).double() + (positive == negative) / 2).mean())


def test_auc_is_the_part_of_pairs_in_order() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = (torch.rand(2000, generator=generator) < 0.3).long()
    scores = torch.randn(2000, generator=generator) + labels
    wanted = pairs_right(labels, scores)
    metric = metrics.create("auc")
    for part in (slice(0, 700), slice(700, 2000)):
        metric.update(labels[part], scores[part])
        metric.reset_local()
    assert math.isnan(metric.get()[1])
    assert metric.get_global() == ("auc", pytest.approx(wanted, abs=1e-4))
    again = metrics.AUC()
    again.load_totals(metric.totals())
    assert again.get() == metric.get_global()
    mine, other = metrics.create(["auc", "acc"]), metrics.create(["auc", "acc"])
    mine.update(labels[:100], scores[:100])
    other.update(labels[100:], scores[100:])
    mine.reduce(Adding(other))
    assert mine.get()[1][0] == metric.get_global()[1]


def test_auc_takes_logits_probabilities_and_scores_of_two_classes() -> None:
    labels = torch.tensor([0, 0, 1, 1, 0, 1])
    logits = torch.tensor([-2.0, 0.1, 0.1, 3.0, float("-inf"), float("inf")])
    wanted = pairs_right(labels, logits)
    for options, preds in (
        ({}, logits),
        ({}, logits[:, None] * 10),
        ({}, torch.stack([torch.ones(6), logits + 1], 1)),
        ({"probabilities": True}, logits.sigmoid()),
        ({"probabilities": True}, torch.stack([1 - logits.sigmoid(), logits.sigmoid()], 1)),
        ({"bins": 1 << 20}, logits.half()),
    ):
        metric = metrics.AUC(**options)  # type: ignore[arg-type]
        metric.update([labels, labels.bool()], [preds, preds])
        assert metric.get()[1] == pytest.approx(wanted)


def test_auc_has_no_value_where_it_is_not_defined() -> None:
    for labels, preds in (([1, 1], [0.0, 1.0]), ([0, 0], [0.0, 1.0]), ([0, 1, 1], [0.0, 1.0, float("nan")]), ([], [])):
        metric = metrics.AUC()
        metric.update(torch.tensor(labels), torch.tensor(preds))
        assert math.isnan(metric.get()[1])
    with pytest.raises(kv.Mismatch, match=r"labels of shape \[2\] do not match predictions of shape \[3\]"):
        metrics.AUC().update(torch.ones(2), torch.ones(3))
    with pytest.raises(kv.UsageError, match="bins=1 must be an integer, at least 2"):
        metrics.create("auc", bins=1)


def test_what_does_not_fit_is_an_error_that_shows_the_shapes() -> None:
    with pytest.raises(kv.Mismatch, match=r"labels of shape \[2\] do not match predictions of shape \[3\]"):
        metrics.Accuracy().update(LABELS[:2], PROBABILITIES)
    with pytest.raises(kv.Mismatch, match="labels of shape"):
        metrics.TopKAccuracy(top_k=2).update(LABELS, LABELS)
    with pytest.raises(kv.Mismatch, match="labels of shape"):
        metrics.CrossEntropy().update(LABELS, LABELS)
    with pytest.raises(kv.Mismatch, match="1 arrays of labels, but 2 of predictions"):
        metrics.Accuracy().update(LABELS, [PROBABILITIES, PROBABILITIES])
