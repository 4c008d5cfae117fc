"""Scores of pairs, and how well they tell a true neighbour from others."""

from __future__ import annotations

import math

import torch
from words.skipgram import loss, nearest, ranking, scores


def test_scores_are_products() -> None:
    centers, targets = torch.tensor([[1.0, 2.0]]), torch.tensor([[[1.0, 0.0], [0.0, 3.0]]])
    assert scores(centers, targets).tolist() == [[1.0, 6.0]]


def test_the_loss_is_that_of_the_papers_sum() -> None:
    scored = torch.tensor([[2.0, -1.0, 0.5]])
    expected = -sum(math.log(1 / (1 + math.exp(-x))) for x in (2.0, 1.0, -0.5))
    assert math.isclose(loss(scored).item(), expected, rel_tol=1e-5)


def test_a_true_neighbour_that_comes_first_and_one_that_comes_last() -> None:
    assert ranking(torch.tensor([[1.0, *[0.0] * 99]]))[:2] == (1.0, 1.0)
    mrr, hits, pairs = ranking(torch.tensor([[-1.0, *[0.0] * 99]]))
    assert (round(mrr, 6), hits, pairs) == (0.01, 0.0, 1)
    assert ranking(torch.zeros(2, 100)).hits == 0.0  # equal scores say nothing
    assert "hits@10 1.0000 of 1 pairs" in str(ranking(torch.tensor([[1.0, 0.0]])))


def test_the_nearest_vectors_have_the_smallest_angle() -> None:
    vectors = torch.tensor([[1.0, 0.0], [9.0, 1.0], [-1.0, 0.0], [1.0, 1.0]])
    assert nearest(vectors, 0, 2) == [1, 3]
