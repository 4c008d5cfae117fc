"""Skip-gram with negative sampling (Mikolov et al., NIPS 2013): scores of pairs of vectors, and how good they are."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, normalize


class Ranking(NamedTuple):
    """How well vectors tell a true neighbour from other identifiers, which were drawn by their frequency.

    Attributes:
        mrr: the mean of one over the true one's place; 1 if it always comes first.
        hits: how often it is among the first ten of a hundred; 0.1 by chance.
        pairs: how many pairs of identifiers were judged.
    """

    mrr: float
    hits: float
    pairs: int

    def __str__(self) -> str:
        return f"MRR {self.mrr:.4f}, hits@10 {self.hits:.4f} of {self.pairs} pairs in files that were not learned"


def scores(centers: Tensor, targets: Tensor) -> Tensor:
    """Return the products of each center's vector and those of its targets.

    Args:
        centers: of shape (pairs, dim).
        targets: of shape (pairs, targets, dim).
    """
    return torch.bmm(targets, centers[:, :, None]).squeeze(2)


def loss(scored: Tensor) -> Tensor:
    """Return the loss of scores: the first of each row is to be high, and the others low."""
    truth = torch.zeros_like(scored)
    truth[:, 0] = 1.0
    return binary_cross_entropy_with_logits(scored, truth, reduction="sum") / len(scored)


def ranking(scored: Tensor) -> Ranking:
    """Return how well scores tell the first of each row from the others; equal scores count half."""
    true, others = scored[:, :1], scored[:, 1:]
    places = 1 + (others > true).sum(dim=1) + (others == true).sum(dim=1) / 2
    return Ranking(float((1 / places).mean()), float((places <= 10).float().mean()), len(scored))


def nearest(vectors: Tensor, number: int, count: int) -> list[int]:
    """Return the numbers of the vectors whose angle with vector `number` is smallest."""
    unit = normalize(vectors)
    similar = unit @ unit[number]
    similar[number] = -2
    return similar.topk(count).indices.tolist()
