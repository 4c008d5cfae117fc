from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

from cifar.images import Dataset, Images  # noqa: E402
from small_cifar10 import write_cifar10  # noqa: E402


@pytest.fixture
def cifar10_folder(tmp_path):
    return write_cifar10(tmp_path / "cifar-10-batches-bin")


@pytest.fixture
def dataset():
    """Pictures that all differ: number i is filled with the bytes of i."""
    pixels = torch.arange(103, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 32, 32).contiguous()
    images = Images(pixels, torch.arange(103) % 10)
    return Dataset("numbers", images, images[:31], (0.0,) * 3, (1 / 255,) * 3, mirrored=True)


@pytest.fixture
def song(tmp_path):
    path = tmp_path / "song.txt"
    path.write_text("abcdefgh " * 100 + "abcdefgX " * 12)
    return path
