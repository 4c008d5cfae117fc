"""One worker's part of a data set, in batches."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Generator, Tensor

from cifar.augment import normalize, random_crop, random_mirror
from cifar.images import DataError, Dataset, Images


class TrainBatches:
    """One worker's images, shuffled and changed at random in each epoch. The same seed gives the same batches.

    Every worker has the same number of batches, so that none waits for a step that the others never make.
    """

    def __init__(self, dataset: Dataset, batch_size: int, *, rank: int, workers: int, seed: int) -> None:
        share = len(dataset.train) // workers
        if share < batch_size:
            raise DataError(
                f"--batch-size {batch_size} is more than a worker's share of {dataset.name}: "
                f"{share} of {len(dataset.train)} pictures for each of {workers}"
            )
        self._dataset = dataset
        self._images = part(dataset.train, rank, workers)[:share]
        self._batch_size = batch_size
        self._seed = (seed, rank)

    def __len__(self) -> int:
        return len(self._images) // self._batch_size

    def epoch(self, number: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches of one epoch. Images that fill no batch are left out, other ones in each epoch."""
        generator = seeded(*self._seed, number)
        order = torch.randperm(len(self._images), generator=generator)
        for chosen in order.split(self._batch_size)[: len(self)]:
            batch = self._images[chosen]
            pictures = random_crop(batch.pixels, generator)
            if self._dataset.mirrored:
                pictures = random_mirror(pictures, generator)
            yield normalize(pictures, self._dataset.mean, self._dataset.std), batch.labels


def validation_batches(
    dataset: Dataset, batch_size: int, *, rank: int, workers: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield one worker's share of the validation images, unchanged. Together the shares have each image once."""
    images = part(dataset.validation, rank, workers)
    for start in range(0, len(images), batch_size):
        batch = images[start : start + batch_size]
        yield normalize(batch.pixels, dataset.mean, dataset.std), batch.labels


def part(images: Images, rank: int, workers: int) -> Images:
    """Return every `workers`-th image, beginning with number `rank`."""
    return images[slice(rank, None, workers)]


def seeded(*seeds: int) -> Generator:
    """Return a random number generator for a tuple of seeds."""
    (state,) = np.random.SeedSequence(seeds).generate_state(1, np.uint64)
    return Generator().manual_seed(int(state))
