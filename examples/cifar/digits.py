"""The handwritten digits in the form of CIFAR-10."""

from __future__ import annotations

import torch
from digits.pictures import SHADES, Pictures, read
from torch.nn import functional

from cifar.images import Dataset, Images


def read_dataset() -> Dataset:
    """Read the digits, 8 x 8 and gray, enlarged to 3 x 32 x 32."""
    training, validation = read()
    return Dataset(
        name="digits",
        train=_enlarged(training),
        validation=_enlarged(validation),
        mean=(0.305, 0.305, 0.305),
        std=(0.324, 0.324, 0.324),
        mirrored=False,
    )


def _enlarged(pictures: Pictures) -> Images:
    gray = torch.from_numpy(pictures.images).float()[:, None] * (255 / SHADES)
    large = functional.interpolate(gray, size=(32, 32), mode="bilinear", align_corners=False)
    return Images(large.round().byte().expand(-1, 3, -1, -1).contiguous(), torch.from_numpy(pictures.labels))
