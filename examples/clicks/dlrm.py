"""DLRM's network but for its embeddings (Naumov et al., arXiv:1906.00091)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class DLRM(nn.Module):
    """Two networks with the products of all pairs of vectors between them.

    Args:
        dense: how many numbers a sample has.
        fields: how many ids it has.
        dim: the length of their vectors.
        hidden: the width of the networks' hidden layers.
    """

    def __init__(self, dense: int, fields: int, dim: int, hidden: int = 64) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(dense, hidden), nn.ReLU(), nn.Linear(hidden, dim), nn.ReLU())
        pairs = fields * (fields + 1) // 2
        self.top = nn.Sequential(nn.Linear(dim + pairs, hidden), nn.ReLU(), nn.Linear(hidden, 1))
        first, second = torch.tril_indices(fields + 1, fields + 1, offset=-1)
        self.register_buffer("pairs", first * (fields + 1) + second, persistent=False)

    def forward(self, dense: Tensor, embedded: Sequence[Tensor]) -> Tensor:
        """Return the logit of a click for each sample.

        Args:
            dense: of shape (samples, numbers).
            embedded: for each field its vectors, of shape (samples, dim).
        """
        below = self.bottom(dense)
        vectors = torch.stack([below, *embedded], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        return self.top(torch.cat([below, products[:, self.pairs]], dim=1)).squeeze(1)
