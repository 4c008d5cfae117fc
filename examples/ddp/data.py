"""Images as a map-style data set of torch's, and what a model makes of them."""

from __future__ import annotations

import torch
from cifar.images import Images
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset

from workers import Reducer


class Pictures(Dataset[tuple[Tensor, Tensor]]):
    """Images (float32, 3 x 32 x 32, from 0 to 1) and labels, like Needle's CIFAR10Dataset."""

    def __init__(self, images: Images) -> None:
        self._images = images

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        return self._images.pixels[number].float() / 255, self._images.labels[number]


@torch.no_grad()
def evaluate(
    model: nn.Module,
    pictures: Dataset[tuple[Tensor, Tensor]],
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
