"""The binary version of CIFAR-10: records of one label byte and 32 x 32 bytes each of red, green and blue."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from cifar.images import DataError, Dataset, Images

TRAIN_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
VALIDATION_FILE = "test_batch.bin"
FILES = (*TRAIN_FILES, VALIDATION_FILE)
CLASSES = 10
PIXELS = 3 * 32 * 32
RECORD = 1 + PIXELS


def read_dataset(folder: Path) -> Dataset:
    """Read CIFAR-10 from the six files in `folder`."""
    train = [read_batch(folder / name) for name in TRAIN_FILES]
    return Dataset(
        name="cifar10",
        train=Images(torch.cat([part.pixels for part in train]), torch.cat([part.labels for part in train])),
        validation=read_batch(folder / VALIDATION_FILE),
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2023, 0.1994, 0.2010),
        mirrored=True,
    )


def read_batch(path: Path) -> Images:
    """Read the images of one file. If it is damaged, the error names it."""
    try:
        raw = torch.from_numpy(np.fromfile(path, dtype=np.uint8))
    except OSError as exc:
        raise DataError(f"{path}: cannot be read ({exc.strerror}); CIFAR-10 is the files {', '.join(FILES)}") from exc
    if len(raw) == 0 or len(raw) % RECORD:
        raise DataError(
            f"{path}: {len(raw)} bytes are not a whole number of records of {RECORD}; "
            "the file is damaged: delete it to have it unpacked or downloaded again"
        )
    records = raw.view(-1, RECORD)
    labels = records[:, 0].long()
    if labels.max() >= CLASSES:
        where = int((labels >= CLASSES).nonzero()[0])
        raise DataError(
            f"{path}: record {where} has the label {labels[where]}, and CIFAR-10 has 0 to {CLASSES - 1}; "
            "the file is damaged: delete it to have it unpacked or downloaded again"
        )
    return Images(records[:, 1:].reshape(-1, 3, 32, 32), labels)
