"""Pictures in memory: the form in which every data set reaches the training loop."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


class DataError(Exception):
    """A data set is missing or damaged; the message says which file and what would help."""


@dataclass(frozen=True)
class Images:
    """Pictures (uint8, N x 3 x 32 x 32) and their labels (int64, N)."""

    pixels: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, chosen: Tensor | slice) -> Images:
        return Images(self.pixels[chosen], self.labels[chosen])


@dataclass(frozen=True)
class Dataset:
    """Pictures to train on, others to validate with, and how to treat them."""

    name: str
    train: Images
    validation: Images
    mean: tuple[float, ...]  # of each channel, where pixels are 0 to 1
    std: tuple[float, ...]
    mirrored: bool  # whether a picture seen in a mirror still shows the same thing
