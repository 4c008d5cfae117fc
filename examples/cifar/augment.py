"""Random changes to whole batches of images."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Generator, Tensor
from torch.nn import functional

PAD = 4
MIN_AREA = 0.64


def random_crop(
    pictures: Tensor, generator: Generator | None, pad: int = PAD, size: Sequence[int] | None = None
) -> Tensor:
    """Crop each image at random after adding a black margin of `pad` pixels; to `size`, or to its old size."""
    count, _, *old = pictures.shape
    height, width = size or old
    padded = functional.pad(pictures, (pad, pad, pad, pad))
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # a view: picture, channel, top, left, row, column
    top = torch.randint(windows.shape[2], (count,), generator=generator)
    left = torch.randint(windows.shape[3], (count,), generator=generator)
    return windows[torch.arange(count), :, top, left]


def center_crop(pictures: Tensor, size: Sequence[int]) -> Tensor:
    """Crop the middle of each image, with the height and width of `size`."""
    top, left = ((old - new) // 2 for old, new in zip(pictures.shape[2:], size, strict=True))
    return pictures[:, :, top : top + size[0], left : left + size[1]]


def random_resized_crop(pictures: Tensor, generator: Generator | None) -> Tensor:
    """Crop a random square of 0.64 to 1 times each image's area, and resize it to the old size, as d2l does."""
    count = len(pictures)
    area, *place = torch.rand(3, count, generator=generator)
    side = (MIN_AREA + (1 - MIN_AREA) * area).sqrt()
    window = torch.zeros(count, 2, 3)
    window[:, 0, 0] = window[:, 1, 1] = side
    window[:, :, 2] = torch.stack([(2 * part - 1) * (1 - side) for part in place], 1)
    grid = functional.affine_grid(window, list(pictures.shape), align_corners=False)
    large = functional.grid_sample(pictures.float(), grid, padding_mode="border", align_corners=False)
    return large.round_().clamp_(0, 255).to(pictures.dtype)


def random_mirror(pictures: Tensor, generator: Generator | None) -> Tensor:
    """Mirror about half of the images, left to right."""
    mirrored = torch.rand(len(pictures), generator=generator) < 0.5
    return torch.where(mirrored[:, None, None, None], pictures.flip(3), pictures)


def normalize(pictures: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Convert bytes to floats of mean 0 and deviation 1 per channel, in the fastest layout for CPU convolutions."""
    scale = 255 * torch.tensor(std).view(-1, 1, 1)
    offset = 255 * torch.tensor(mean).view(-1, 1, 1)
    return pictures.to(torch.float32, memory_format=torch.channels_last).sub_(offset).div_(scale)
