"""The data: MNIST if its files are there, otherwise handwritten digits in its form."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from digits.pictures import SHADES, Pictures, read
from torch.nn import functional

from mnist.idx import DataError, read_image_file, read_label_file

IMG_SIZE = 28
NUM_CLASSES = 10
FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


@dataclass(frozen=True)
class Dataset:
    """Images (float32 from 0 to 1, N x 1 x 28 x 28) and one-hot labels (float32, N x 10), for training and testing."""

    train_x: np.ndarray
    train_y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray


def find_mnist(folder: Path) -> list[Path] | None:
    """Return MNIST's four files in `folder`, compressed or not; None if one is missing."""
    paths = [next((p for p in (folder / f"{name}.gz", folder / name) if p.is_file()), None) for name in FILES]
    return [path for path in paths if path] if all(paths) else None


def load_mnist(paths: list[Path]) -> Dataset:
    """Read MNIST's four files, in the order of `FILES`."""
    arrays = []
    for images, labels in (paths[:2], paths[2:]):
        x, y = read_image_file(images), read_label_file(labels)
        if x.shape[1:] != (1, IMG_SIZE, IMG_SIZE):
            raise DataError(f"{images} has pictures of {x.shape[2]} x {x.shape[3]}, not {IMG_SIZE} x {IMG_SIZE}")
        if len(x) != len(y):
            raise DataError(f"{images} has {len(x)} pictures, but {labels} has {len(y)} labels")
        if len(y) and y.max() >= NUM_CLASSES:
            raise DataError(f"{labels} has a label {y.max()}; there are {NUM_CLASSES} digits")
        arrays += [x.astype(np.float32) / 255, to_categorical(y, NUM_CLASSES)]
    return Dataset(*arrays)


def load_digits() -> Dataset:
    """Load the 1797 digits, 8 x 8, enlarged to 20 x 20 within 28 x 28 as in MNIST."""
    training, validation = read()
    return Dataset(*_enlarged(training), *_enlarged(validation))


def _enlarged(pictures: Pictures) -> tuple[np.ndarray, np.ndarray]:
    gray = torch.from_numpy(pictures.images).float()[:, None] / SHADES
    large = functional.interpolate(gray, size=(20, 20), mode="bilinear", align_corners=False)
    return functional.pad(large, (4, 4, 4, 4)).numpy(), to_categorical(pictures.labels, NUM_CLASSES)


def to_categorical(y: np.ndarray, num_classes: int) -> np.ndarray:
    """Return labels as one-hot rows."""
    categorical: np.ndarray = np.eye(num_classes, dtype=np.float32)[np.asarray(y, dtype=int)]
    return categorical


def data_partition(
    dataset_x: np.ndarray, dataset_y: np.ndarray, rank_in_global: int, world_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the part of one worker. All parts are equally long, for as many steps each; the rest is left out."""
    data_per_rank = dataset_x.shape[0] // world_size
    idx_start = rank_in_global * data_per_rank
    idx_end = (rank_in_global + 1) * data_per_rank
    return dataset_x[idx_start:idx_end], dataset_y[idx_start:idx_end]


def evaluation_partition(
    dataset_x: np.ndarray, dataset_y: np.ndarray, rank_in_global: int, world_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the part of one worker for evaluation. Together the parts have each image once."""
    return dataset_x[rank_in_global::world_size], dataset_y[rank_in_global::world_size]


def augmentation(x: np.ndarray, batch_size: int, random: np.random.Generator, mirror: bool = True) -> np.ndarray:
    """Shift each image of a batch by up to four pixels each way, and mirror half of them, in place."""
    xpad = np.pad(x, [[0, 0], [0, 0], [4, 4], [4, 4]], "symmetric")
    for data_num in range(batch_size):
        offset = random.integers(8, size=2)
        x[data_num] = xpad[data_num, :, offset[0] : offset[0] + IMG_SIZE, offset[1] : offset[1] + IMG_SIZE]
        if mirror and random.integers(2):
            x[data_num] = x[data_num, :, :, ::-1].copy()
    return x
