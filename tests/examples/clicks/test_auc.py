"""The area under the ROC curve, and the logarithmic loss."""

from __future__ import annotations

import math

import numpy as np
import pytest
from clicks.auc import auc, log_loss, quality


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
