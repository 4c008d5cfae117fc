"""A worker's batches, as torch's DataLoader gives them: its part of the pictures by a SplitBatchSampler."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

from torch import Generator, Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from cifar.augment import normalise, random_crop, random_mirror, random_resized_crop
from cifar.images import DataError, Dataset, Images
from kvstore import KVStore
from workers import SplitBatchSampler

CROPS: dict[str, Callable[[Tensor, Generator | None], Tensor]] = {
    "pad": random_crop,
    "resize": random_resized_crop,
    "none": lambda pictures, _: pictures,
}


class Pictures(TorchDataset[tuple[Tensor, Tensor]]):
    """Whole batches of pictures by the list of their numbers; what is random comes from torch's own generator."""

    def __init__(self, dataset: Dataset, images: Images, crop: str = "none", mirrored: bool = False) -> None:
        self._dataset, self._images, self._crop, self._mirrored = dataset, images, CROPS[crop], mirrored

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, numbers: list[int]) -> tuple[Tensor, Tensor]:
        pixels = self._crop(self._images.pixels[numbers], None)
        if self._mirrored:
            pixels = random_mirror(pixels, None)
        return normalise(pixels, self._dataset.mean, self._dataset.std), self._images.labels[numbers]


def train_loader(dataset: Dataset, args: Namespace, store: KVStore) -> DataLoader[Any]:
    """This worker's part to train on: another one in each epoch, changed at random."""
    share = len(dataset.train) // store.num_workers
    if share < args.batch_size:
        raise DataError(
            f"--batch-size {args.batch_size} is more than a worker's share of {dataset.name}: "
            f"{share} of {len(dataset.train)} pictures for each of {store.num_workers}"
        )
    pictures = Pictures(dataset, dataset.train, args.random_crop, bool(args.random_mirror) and dataset.mirrored)
    place = store.num_workers, store.rank
    sampler = SplitBatchSampler(len(pictures), args.batch_size, *place, args.last_batch, seed=args.seed)
    return DataLoader(pictures, sampler=sampler, batch_size=None, num_workers=args.data_nthreads)


def validation_loader(dataset: Dataset, args: Namespace, store: KVStore) -> DataLoader[Any]:
    """This worker's part to validate with, unchanged; together the workers see each picture once."""
    pictures = Pictures(dataset, dataset.validation)
    sampler = SplitBatchSampler(len(pictures), args.batch_size, store.num_workers, store.rank, shuffle=False)
    return DataLoader(pictures, sampler=sampler, batch_size=None)
