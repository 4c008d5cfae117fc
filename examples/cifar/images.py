"""Images in memory, the form of every data set."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


class DataError(Exception):
    """A data set is missing or damaged. The message says which file, and what to do."""


@dataclass(frozen=True)
class Images:
    """Images (uint8, N x 3 x 32 x 32) and their labels (int64, N)."""

    pixels: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, chosen: Tensor | slice) -> Images:
        return Images(self.pixels[chosen], self.labels[chosen])


@dataclass(frozen=True)
class Dataset:
    """Images for training, images for validation, and how to normalize and augment them."""

    name: str
    train: Images
    validation: Images
    mean: tuple[float, ...]  # per channel, for pixels from 0 to 1
    std: tuple[float, ...]
    mirrored: bool  # whether mirrored images may be used for training
