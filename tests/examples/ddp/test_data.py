"""Pictures as a torch data set."""

from __future__ import annotations

import torch
from ddp.data import Pictures


def test_pictures_are_from_0_to_1(dataset) -> None:
    pictures = Pictures(dataset.train)
    picture, label = pictures[51]
    assert len(pictures) == 103
    assert torch.equal(picture, torch.full((3, 32, 32), 0.2))
    assert label == 1
