"""Networks for 32 x 32 images, and random images to train them on: only the time matters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

CLASSES = 10
BATCH = 16


class Residual(nn.Module):
    """Two convolutions whose output is added to the input, by a 1 x 1 convolution where shapes differ."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != width:
            self.shortcut = nn.Sequential(nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        y = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


def residual_network(widths: Sequence[int], blocks: int) -> nn.Module:
    """A convolution, ``blocks`` residual blocks for each width, the mean over the image, and a classifier."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, widths[0], 3, padding=1, bias=False),
        nn.BatchNorm2d(widths[0]),
        nn.ReLU(),
    ]
    before = widths[0]
    for stage, width in enumerate(widths):
        for block in range(blocks):
            layers.append(Residual(before, width, 2 if stage and not block else 1))
            before = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, CLASSES))


def resnet8() -> nn.Module:
    """The 6n + 2 layers for CIFAR-10 with n = 1: 78 thousand parameters."""
    return residual_network((16, 32, 64), blocks=1)


def resnet18() -> nn.Module:
    """ResNet-18 for 32 x 32 images: 11.2 million parameters."""
    return residual_network((64, 128, 256, 512), blocks=2)


MODELS: dict[str, Callable[[], nn.Module]] = {"resnet8": resnet8, "resnet18": resnet18}


def build(name: str) -> nn.Module:
    """Return the model of that name. Every call gives the same weights."""
    torch.manual_seed(0)
    return MODELS[name]()


def pictures(seed: int, batch: int = BATCH) -> tuple[Tensor, Tensor]:
    """Return a batch of random images and labels. The same seed gives the same batch."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(batch, 3, 32, 32, generator=generator), torch.randint(CLASSES, (batch,), generator=generator)
