"""The accuracy and loss of a model on held-out images, computed by all workers together."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset

from workers import Reducer


@torch.no_grad()
def evaluate(
    model: nn.Module,
    pictures: Dataset[tuple[torch.Tensor, torch.Tensor]],
    reducer: Reducer,
    *,
    batch_size: int,
    rank: int,
    size: int,
) -> tuple[float, float]:
    """Return accuracy and mean loss over all ``pictures``. Every worker evaluates its share of them.

    Batch-norm statistics, which each worker has collected from its own images, are averaged first.
    """
    reducer.average_buffers(model)
    share = Subset(pictures, range(rank, len(pictures), size))  # type: ignore[arg-type]
    device = next(model.parameters()).device
    model.eval()
    sums = {"right": 0.0, "loss": 0.0, "count": 0.0}
    for x, y in DataLoader(share, batch_size):
        out = model(x.to(device)).cpu()
        sums["right"] += float((out.argmax(1) == y).sum())
        sums["loss"] += float(nn.functional.cross_entropy(out, y, reduction="sum"))
        sums["count"] += len(y)
    model.train()
    totals = reducer.sum(sums)
    return totals["right"] / totals["count"], totals["loss"] / totals["count"]
