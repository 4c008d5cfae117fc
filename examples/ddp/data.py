"""Images as a map-style data set of torch's."""

from __future__ import annotations

from cifar.images import Images
from torch import Tensor
from torch.utils.data import Dataset


class Pictures(Dataset[tuple[Tensor, Tensor]]):
    """Images (float32, 3 x 32 x 32, from 0 to 1) and labels, like Needle's CIFAR10Dataset."""

    def __init__(self, images: Images) -> None:
        self._images = images

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        return self._images.pixels[number].float() / 255, self._images.labels[number]
