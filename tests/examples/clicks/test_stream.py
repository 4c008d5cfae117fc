"""The clicks: the same from the same seed, whoever asks, with ids that drift."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from clicks.auc import auc, log_loss, quality
from clicks.dlrm import DLRM
from clicks.stream import DENSE, LARGE, Clicks


def test_workers_have_parts_of_one_batch() -> None:
    clicks = Clicks(seed=3, fields=5)
    whole = clicks.batch(7, 10)
    for part in range(3):
        mine = Clicks(seed=3, fields=5).batch(7, 10, part, 3)
        for values, all_of_them in zip(mine, whole, strict=True):
            assert np.array_equal(values, all_of_them[part::3])
    assert whole.ids.shape == whole.rows.shape == (10, 5)
    assert whole.dense.shape == (10, DENSE)
    assert [batch.ids.tolist() for batch in clicks.batches(range(7, 8), 10)] == [whole.ids.tolist()]


def test_other_seeds_and_other_batches_differ() -> None:
    whole = Clicks(seed=3).batch(7, 10)
    assert not torch.equal(Clicks(seed=4).batch(7, 10).ids, whole.ids)
    assert not torch.equal(Clicks(seed=3).batch(8, 10).ids, whole.ids)


def test_a_few_ids_are_frequent_and_most_are_rare() -> None:
    rows = Clicks(fields=3, largest=10_000, period=0).batch(0, 5000).rows
    counts = rows[:, 2].bincount()
    assert rows[:, 2].max() < 10_000
    assert counts[:10].sum() > 1000
    assert (counts == 1).sum() > 500


def test_rows_and_ids_stand_for_one_another() -> None:
    clicks = Clicks(fields=4, largest=5000, period=5)
    batches = [clicks.batch(number, 500) for number in range(12)]
    counts = clicks.rows(12)
    for field in range(4):
        rows = torch.cat([batch.rows[:, field] for batch in batches])
        ids = torch.cat([batch.ids[:, field] for batch in batches])
        assert rows.max() < counts[field]
        assert len({*zip(rows.tolist(), ids.tolist(), strict=True)}) == len(rows.unique()) == len(ids.unique())


def test_the_ids_of_large_fields_drift() -> None:
    clicks = Clicks(fields=2, largest=2 * LARGE, period=10)
    early, half, late = (set(clicks.batch(number, 2000).ids[:, 1].tolist()) for number in (0, 5, 10))
    small = [set(clicks.batch(number, 2000).ids[:, 0].tolist()) for number in (0, 10)]
    assert not early & late
    assert len(early & half) > 100
    assert small[0] & small[1]


def test_the_true_chances_are_the_best_that_there_is() -> None:
    batch = Clicks().batch(0, 20_000)
    labels = batch.labels.numpy()
    best = auc(batch.chances, labels)
    assert 0.75 < best < 0.85
    assert abs(labels.mean() - batch.chances.mean()) < 0.02
    assert auc(batch.dense.numpy() @ np.ones(DENSE), labels) < best


# ---- The area under the ROC curve, and the logarithmic loss


def test_it_is_the_share_of_pairs_in_the_right_order() -> None:
    random = np.random.default_rng(0)
    scores, labels = random.integers(0, 5, 60).astype(float), random.integers(0, 2, 60)
    pairs = [(a, b) for a in scores[labels == 1] for b in scores[labels == 0]]
    assert auc(scores, labels) == pytest.approx(np.mean([(a > b) + (a == b) / 2 for a, b in pairs]))


@pytest.mark.parametrize(("scores", "expected"), [([1, 2, 3, 4], 1.0), ([4, 3, 2, 1], 0.0), ([1, 1, 1, 1], 0.5)])
def test_the_ends_and_the_middle(scores: list[float], expected: float) -> None:
    assert auc(np.array(scores), np.array([0, 0, 1, 1])) == expected


def test_labels_that_are_all_the_same_have_none() -> None:
    assert math.isnan(auc(np.array([1.0, 2.0]), np.ones(2)))


def test_log_loss_of_certainty_and_of_ignorance() -> None:
    labels = np.array([1, 0])
    assert log_loss(np.array([0.5, 0.5]), labels) == pytest.approx(math.log(2))
    assert log_loss(np.array([1.0, 0.0]), labels) == pytest.approx(0, abs=1e-9)
    assert math.isfinite(log_loss(np.array([0.0, 1.0]), labels))


def test_the_best_is_said_where_it_is_known() -> None:
    labels = np.array([1, 0, 1, 0])
    predicted, true = np.array([0.4, 0.3, 0.2, 0.1]), np.array([0.9, 0.1, 0.9, 0.1])
    assert str(quality(predicted, true, labels)).startswith(
        "AUC 0.7500 of 4 samples not trained on, where 1.0000 is the best possible; log loss 0."
    )
    assert str(quality(predicted, np.empty(0), labels)).startswith("AUC 0.7500 of 4 samples not trained on; log loss")


# ---- DLRM's network


def test_pairs_are_all_different_ones() -> None:
    network = DLRM(dense=3, fields=2, dim=4, hidden=8)
    assert sorted(network.pairs.tolist()) == [3, 6, 7]  # (1, 0), (2, 0), (2, 1) of 3 x 3


def test_logits_depend_on_all_that_comes_in() -> None:
    torch.manual_seed(0)
    network = DLRM(dense=3, fields=2, dim=4, hidden=8)
    inputs = [torch.randn(5, 3), torch.randn(5, 4), torch.randn(5, 4)]
    for each in inputs:
        each.requires_grad_()
    logits = network(inputs[0], inputs[1:])
    assert logits.shape == (5,)
    logits.sum().backward()
    assert all(each.grad.any() for each in inputs)
