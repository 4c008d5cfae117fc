"""Files of CIFAR-10's format, small."""

from __future__ import annotations

from pathlib import Path

import numpy as np


def batch_file(records: int, seed: int = 0) -> bytes:
    """The bytes of a file: a label and 3 x 32 x 32 pixels, again and again."""
    random = np.random.default_rng(seed)
    rows = random.integers(256, size=(records, 3073), dtype=np.uint8)
    rows[:, 0] = np.arange(records) % 10
    return rows.tobytes()


def write_cifar10(folder: Path, records: int = 20) -> Path:
    """The six files."""
    from cifar.cifar10 import FILES

    folder.mkdir(parents=True, exist_ok=True)
    for seed, name in enumerate(FILES):
        (folder / name).write_bytes(batch_file(records, seed))
    return folder
