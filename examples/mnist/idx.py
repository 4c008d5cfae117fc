"""MNIST's files: arrays of bytes in the idx format, as they are or compressed by gzip.

A file begins with a magic number (0x0800 plus the number of dimensions) and the length of each dimension, all
big-endian 32-bit integers. The bytes follow.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np

IMAGES_MAGIC, LABELS_MAGIC = 2051, 2049
LONGEST = 1 << 30  # bytes; MNIST's largest file has 47 MB


class DataError(Exception):
    """A data set is missing or damaged. The message says which file, and what to do."""


def read_image_file(path: Path) -> np.ndarray:
    """Return the images in `path`, uint8, N x 1 x rows x columns."""
    return _read(path, IMAGES_MAGIC, 3, "pictures")[:, None]


def read_label_file(path: Path) -> np.ndarray:
    """Return the labels in `path`, uint8, N."""
    return _read(path, LABELS_MAGIC, 1, "labels")


def _read(path: Path, magic: int, dimensions: int, what: str) -> np.ndarray:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            data = file.read(LONGEST + 1)
    except (OSError, EOFError, zlib.error) as exc:
        raise DataError(f"{path} cannot be read: {exc}; fetch it again") from exc
    head = 4 * (1 + dimensions)
    if len(data) < head:
        raise DataError(f"{path} has {len(data)} bytes, less than the head of an idx file; fetch it again")
    begins_with, *shape = struct.unpack_from(f">{1 + dimensions}I", data)
    if begins_with != magic:
        raise DataError(f"{path} begins with {begins_with}, but an idx file of {what} begins with {magic}")
    if len(data) - head != math.prod(shape):
        size = " x ".join(map(str, shape))
        raise DataError(f"{path} has {len(data) - head} bytes for {size} {what}; fetch it again")
    return np.frombuffer(data, np.uint8, offset=head).reshape(shape)
