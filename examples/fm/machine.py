"""A factorization machine of the rows that a batch needs."""

from __future__ import annotations

from torch import Tensor


def logits(values: Tensor, linear: Tensor, factors: Tensor, bias: Tensor) -> Tensor:
    """Return the logit of each sample: ``b + Σ w·x + Σ over pairs of <v, v'>·x·x'``.

    Args:
        values: of each sample's features, of shape (samples, features); 0 where a sample has fewer.
        linear: the weight of each of these features, of shape (samples, features).
        factors: their vectors, of shape (samples, features, factors).
        bias: a number.
    """
    scaled = factors * values[..., None]
    pairs = scaled.sum(dim=1).square() - scaled.square().sum(dim=1)
    return bias + (linear * values).sum(dim=1) + pairs.sum(dim=1) / 2
