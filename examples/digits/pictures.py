"""The handwritten digits, as arrays."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

FILE = Path(__file__).with_name("pictures.npz")
SHADES = 16  # the value of a white pixel; 0 is black
TRAINING = 1437  # the first ones; with a fixed order no run has trained on what another validates with


class Pictures(NamedTuple):
    """Pictures (uint8 from 0 to 16, N x 8 x 8) and which digit each shows (int64, N)."""

    images: np.ndarray
    labels: np.ndarray


def read() -> tuple[Pictures, Pictures]:
    """Return the pictures to train on, and those to validate with."""
    with np.load(FILE, allow_pickle=False) as arrays:
        images, labels = arrays["images"], arrays["labels"].astype(np.int64)
    return Pictures(images[:TRAINING], labels[:TRAINING]), Pictures(images[TRAINING:], labels[TRAINING:])
