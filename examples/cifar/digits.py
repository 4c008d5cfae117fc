"""Scikit-learn's handwritten digits in the form of CIFAR-10: 1797 real images without a download."""

from __future__ import annotations

import torch
from torch.nn import functional

from cifar.images import DataError, Dataset, Images

VALIDATION_PART = 0.2
SPLIT_SEED = 0  # fixed, so that no run has trained on what another validates with


def read_dataset() -> Dataset:
    """Read the digits, 8 x 8 and gray, enlarged to 3 x 32 x 32."""
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError as exc:
        raise DataError("the digits come with scikit-learn, which is not installed: pip install scikit-learn") from exc
    digits = load_digits()
    gray = torch.from_numpy(digits.images).float()[:, None] * (255 / 16)
    large = functional.interpolate(gray, size=(32, 32), mode="bilinear", align_corners=False)
    images = Images(large.round().byte().expand(-1, 3, -1, -1).contiguous(), torch.from_numpy(digits.target).long())
    train, validation = train_test_split(
        range(len(images)), test_size=VALIDATION_PART, stratify=digits.target, random_state=SPLIT_SEED
    )
    return Dataset(
        name="digits",
        train=images[torch.tensor(train)],
        validation=images[torch.tensor(validation)],
        mean=(0.305, 0.305, 0.305),
        std=(0.324, 0.324, 0.324),
        mirrored=False,
    )
