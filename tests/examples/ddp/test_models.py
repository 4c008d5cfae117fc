"""Needle's ResNet9."""

from __future__ import annotations

import torch
from ddp.models import ResNet9


def test_the_network_is_needles() -> None:
    model = ResNet9()
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    convolutions = [tuple(its.shape) for its in model.parameters() if its.dim() == 4]
    assert convolutions == [
        (16, 3, 7, 7),
        (32, 16, 3, 3),
        (32, 32, 3, 3),
        (32, 32, 3, 3),
        (64, 32, 3, 3),
        (128, 64, 3, 3),
        (128, 128, 3, 3),
        (128, 128, 3, 3),
    ]
