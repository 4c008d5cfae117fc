"""SINGA's network for MNIST: two convolutions, two linear layers, 431,080 parameters."""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.nn import functional


class CNN(nn.Module):
    """From images, N x 1 x 28 x 28, to the scores of ten classes.

    Initial weights have the distribution of SINGA's layers. At SINGA's rate they learn faster than torch's smaller
    ones.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 20, 5, padding=0)
        self.conv2 = nn.Conv2d(20, 50, 5, padding=0)
        self.linear1 = nn.Linear(4 * 4 * 50, 500)
        self.linear2 = nn.Linear(500, 10)
        self.pooling1 = nn.MaxPool2d(2, 2, padding=0)
        self.pooling2 = nn.MaxPool2d(2, 2, padding=0)
        for layer in (self.conv1, self.conv2, self.linear1, self.linear2):
            fan_in, out = layer.weight[0].numel(), len(layer.weight)  # of a convolution, SINGA counts channels out
            nn.init.normal_(layer.weight, std=math.sqrt(2 / (fan_in + out)))
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores."""
        y = self.conv1(x)
        y = functional.relu(y)
        y = self.pooling1(y)
        y = self.conv2(y)
        y = functional.relu(y)
        y = self.pooling2(y)
        y = y.flatten(1)
        y = self.linear1(y)
        y = functional.relu(y)
        return self.linear2(y)
