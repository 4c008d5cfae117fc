"""SINGA's network."""

from __future__ import annotations

import math

import pytest
import torch
from mnist.cnn import CNN


def test_the_network_is_singas():
    assert sum(param.numel() for param in CNN().parameters()) == 431080
    assert CNN()(torch.zeros(2, 1, 28, 28)).shape == (2, 10)


@pytest.mark.parametrize(
    ("layer", "fans"), [("conv1", 25 + 20), ("conv2", 500 + 50), ("linear1", 800 + 500), ("linear2", 500 + 10)]
)
def test_initial_weights_are_drawn_as_singas(layer, fans):
    torch.manual_seed(0)
    drawn = getattr(CNN(), layer)
    assert drawn.weight.std().item() == pytest.approx(math.sqrt(2 / fans), rel=0.1)
    assert abs(drawn.weight.mean().item()) < 0.1 * math.sqrt(2 / fans)
    assert not drawn.bias.any()
