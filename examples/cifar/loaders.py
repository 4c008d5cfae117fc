"""A worker's batches from torch's DataLoader, with its part of the images from a SplitBatchSampler."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from cifar import distort
from cifar.augment import center_crop, normalize, random_crop, random_mirror, random_resized_crop
from cifar.batches import seeded
from cifar.images import DataError, Dataset, Images
from kvstore import KVStore
from workers import SplitBatchSampler

SYNTHETIC = 50_000  # pictures in an epoch of noise, as many as CIFAR-10 has


class Pictures(TorchDataset[tuple[Tensor, Tensor]]):
    """Whole batches by the list of their images' numbers, changed by `change` before they become floats."""

    def __init__(self, dataset: Dataset, images: Images, change: Callable[[Tensor], Tensor]) -> None:
        self._dataset, self._images, self._change = dataset, images, change

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, numbers: list[int]) -> tuple[Tensor, Tensor]:
        pixels = self._change(self._images.pixels[numbers])
        return normalize(pixels, self._dataset.mean, self._dataset.std), self._images.labels[numbers]


def train_loader(dataset: Dataset, args: Namespace, store: KVStore) -> DataLoader[Any]:
    """Return a loader of this worker's training images: another part in each epoch, changed at random."""
    share = len(dataset.train) // store.num_workers
    if share < args.batch_size:
        raise DataError(
            f"--batch-size {args.batch_size} is more than a worker's share of {dataset.name}: "
            f"{share} of {len(dataset.train)} pictures for each of {store.num_workers}"
        )
    pictures = Pictures(dataset, dataset.train, partial(changed, args=args, mirrored=dataset.mirrored))
    place = store.num_workers, store.rank
    sampler = SplitBatchSampler(len(pictures), args.batch_size, *place, args.last_batch, seed=args.seed)
    return DataLoader(pictures, sampler=sampler, batch_size=None, num_workers=args.data_nthreads)


def validation_loader(dataset: Dataset, args: Namespace, store: KVStore) -> DataLoader[Any]:
    """Return a loader of this worker's validation images, unchanged. Together the workers have each image once."""
    pictures = Pictures(dataset, dataset.validation, partial(center_crop, size=args.image_shape[1:]))
    sampler = SplitBatchSampler(len(pictures), args.batch_size, store.num_workers, store.rank, shuffle=False)
    return DataLoader(pictures, sampler=sampler, batch_size=None)


def changed(pixels: Tensor, args: Namespace, mirrored: bool) -> Tensor:
    """Return a batch changed at random as the options say, with torch's global generator."""
    angle, shear, aspect = args.max_random_rotate_angle, args.max_random_shear_ratio, args.max_random_aspect_ratio
    scale = args.min_random_scale, args.max_random_scale
    if angle or shear or aspect or scale != (1, 1):
        pixels = distort.affine(pixels, None, angle=angle, shear=shear, aspect=aspect, scale=scale)
    size = args.image_shape[1:]
    if args.random_crop == "1":
        pixels = random_crop(pixels, None, args.pad_size, size)
    else:
        pixels = center_crop(pixels if args.random_crop == "0" else random_resized_crop(pixels, None), size)
    if args.max_random_h or args.max_random_s or args.max_random_l:
        amount = {"hue": args.max_random_h, "saturation": args.max_random_s, "lightness": args.max_random_l}
        pixels = distort.recolor(pixels, None, **amount)
    return random_mirror(pixels, None) if args.random_mirror and mirrored else pixels


def synthetic(args: Namespace, store: KVStore) -> list[tuple[Tensor, Tensor]]:
    """Return an epoch of one repeated batch of noise, to measure the speed without reading."""
    generator = seeded(args.seed, store.rank)
    pictures = torch.rand(args.batch_size, *args.image_shape, generator=generator) * 2 - 1
    labels = torch.randint(args.num_classes, (args.batch_size,), generator=generator)
    batch = pictures.to(memory_format=torch.channels_last), labels
    return [batch] * max(1, (args.num_examples or SYNTHETIC) // store.num_workers // args.batch_size)
