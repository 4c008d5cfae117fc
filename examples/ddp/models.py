"""Needle's ResNet9 (apps/models.py of CMU's course on deep learning systems), with torch's layers."""

from __future__ import annotations

from torch import Tensor, nn


class ConvBN(nn.Sequential):
    """A padded convolution, batch norm and ReLU."""

    def __init__(self, channels: int, out: int, kernel: int, stride: int) -> None:
        super().__init__(nn.Conv2d(channels, out, kernel, stride, padding=kernel // 2), nn.BatchNorm2d(out), nn.ReLU())


class Residual(nn.Sequential):
    """Layers whose input is added to their output."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of ``x`` and the layers' output."""
        added: Tensor = super().forward(x) + x
        return added


class ResNet9(nn.Sequential):
    """From images, N x 3 x 32 x 32, to the logits of ten classes, N x 10."""

    def __init__(self) -> None:
        super().__init__(
            ConvBN(3, 16, 7, 4),
            ConvBN(16, 32, 3, 2),
            Residual(ConvBN(32, 32, 3, 1), ConvBN(32, 32, 3, 1)),
            ConvBN(32, 64, 3, 2),
            ConvBN(64, 128, 3, 2),
            Residual(ConvBN(128, 128, 3, 1), ConvBN(128, 128, 3, 1)),
            nn.Flatten(),
            nn.Linear(128, 128),
            nn.ReLU(),
            nn.Linear(128, 10),
        )
