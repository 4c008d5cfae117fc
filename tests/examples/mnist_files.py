"""MNIST's files, small, and what the scripts print that train on them."""

from __future__ import annotations

import gzip
import re
import struct
import subprocess
from pathlib import Path

import numpy as np
from mnist import data
from scripts import lines_of

FOUR = (*data.FILES,)


def idx_images(count: int, size: int = 28, seed: int = 0) -> tuple[bytes, np.ndarray]:
    pixels = np.random.default_rng(seed).integers(256, size=(count, size, size), dtype=np.uint8)
    return struct.pack(">4I", 2051, count, size, size) + pixels.tobytes(), pixels


def idx_labels(count: int) -> tuple[bytes, np.ndarray]:
    labels = (np.arange(count) % 10).astype(np.uint8)
    return struct.pack(">2I", 2049, count) + labels.tobytes(), labels


def write_mnist(folder: Path, train: int = 48, test: int = 21) -> Path:
    """MNIST's four files, small: compressed, but for the last."""
    for name, count in zip(FOUR, (train, train, test, test), strict=True):
        content = (idx_images if "images" in name else idx_labels)(count)[0]
        if name == FOUR[-1]:
            (folder / name).write_bytes(content)
        else:
            (folder / f"{name}.gz").write_bytes(gzip.compress(content))
    return folder


LINES = [
    r"\(48, 1, 28, 28\)",
    r"\(48, 10\)",
    r"\(21, 1, 28, 28\)",
    r"\(21, 10\)",
    r"Starting Epoch 0:",
    r"Training loss = \d+\.\d{6}, training accuracy = [01]\.\d{6}",
    r"Evaluation accuracy = [01]\.\d{6}, Elapsed Time = \d+\.\d{6}s",
]


def require_lines(process: subprocess.CompletedProcess[str]) -> None:
    """Require that a job of two workers has ended well, and that rank 0 alone has printed these lines."""
    assert process.returncode == 0, process.stdout
    assert lines_of(process, 1) == []
    lines = lines_of(process, 0)
    assert all(re.fullmatch(*pair) for pair in zip(LINES, lines, strict=True)), lines
