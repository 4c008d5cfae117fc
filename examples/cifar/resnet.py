"""Residual networks for 32 x 32 pictures, after He et al., "Deep Residual Learning for Image Recognition" (2015)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

CLASSES = 10
NETWORKS = ("resnet", "resnet18", "resnet18-d2l")


def build(network: str, num_layers: int, classes: int = CLASSES, dtype: torch.dtype = torch.float32) -> Classifier:
    """Build `resnet` with 6n + 2 layers, the paper's for CIFAR-10, or a wide network, which ignores `num_layers`.

    The wide ones are `resnet18`, and `resnet18-d2l`, as in the book "Dive into Deep Learning".
    """
    model = _build(network, num_layers, classes)
    model.dtype = dtype
    return model


def _build(network: str, num_layers: int, classes: int) -> Classifier:
    if network == "resnet18":
        return ResNet(widths=(64, 128, 256, 512), blocks=2, shortcut=Projection, classes=classes)
    if network == "resnet18-d2l":
        return D2LResNet18(classes)
    if network != "resnet":
        raise ValueError(f"no network {network!r}; choose from {', '.join(NETWORKS)}")
    if num_layers < 8 or num_layers % 6 != 2:
        raise ValueError(f"a resnet has 6n + 2 layers, 8, 14, 20, 32, 44, 50, 56 or 110 for example; not {num_layers}")
    return ResNet(widths=(16, 32, 64), blocks=num_layers // 6, shortcut=Pad, classes=classes)


class Classifier(nn.Sequential):
    """Layers that compute in `dtype` by `torch.autocast`. Parameters and scores are float32."""

    dtype = torch.float32

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of each class for a batch of images."""
        with torch.autocast(x.device.type, self.dtype, enabled=self.dtype != torch.float32):
            return super().forward(x).float()  # type: ignore[no-any-return]


class ResNet(Classifier):
    """A convolution, a stage of residual blocks for each width, the mean over the image, and a classifier.

    All stages but the first halve height and width.
    """

    def __init__(self, widths: Sequence[int], blocks: int, shortcut: type[nn.Module], classes: int = CLASSES) -> None:
        layers: list[nn.Module] = [conv3x3(3, widths[0]), nn.BatchNorm2d(widths[0]), nn.ReLU(inplace=True)]
        before = widths[0]
        for stage, width in enumerate(widths):
            for block in range(blocks):
                layers.append(Residual(before, width, 2 if stage and not block else 1, shortcut))
                before = width
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, nn.Linear):
                nn.init.kaiming_normal_(module.weight, nonlinearity="linear")
                nn.init.zeros_(module.bias)


class D2LResNet18(Classifier):
    """d2l's ResNet-18: convolutions have biases, shortcuts have no normalization, and initial weights are Xavier's."""

    def __init__(self, classes: int = CLASSES) -> None:
        layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
        before = 64
        for width in (64, 128, 256, 512):
            layers += [D2LResidual(before, width), D2LResidual(width, width)]
            before = width
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes))
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)


class D2LResidual(nn.Module):
    """Two convolutions, and a third as the shortcut where the width changes."""

    def __init__(self, before: int, width: int) -> None:
        super().__init__()
        stride = 1 if before == width else 2
        self.conv1 = nn.Conv2d(before, width, 3, stride, padding=1)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.conv3 = nn.Identity() if before == width else nn.Conv2d(before, width, 1, stride)
        self.bn1, self.bn2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        y = functional.relu(self.bn1(self.conv1(x)))
        return functional.relu(self.bn2(self.conv2(y)) + self.conv3(x))


class Residual(nn.Module):
    """Two convolutions, whose output is added to the input."""

    def __init__(self, before: int, width: int, stride: int, shortcut: type[nn.Module]) -> None:
        super().__init__()
        self.conv1 = conv3x3(before, width, stride)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = conv3x3(width, width)
        self.norm2 = nn.BatchNorm2d(width)
        self.shortcut = nn.Identity() if stride == 1 and before == width else shortcut(before, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        y = functional.relu(self.norm1(self.conv1(x)), inplace=True)
        y = self.norm2(self.conv2(y))
        return functional.relu(y.add_(self.shortcut(x)), inplace=True)


class Pad(nn.Module):
    """The paper's shortcut without parameters: it skips pixels and fills new channels with zeros."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.stride, self.new = stride, width - before

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` with fewer pixels and more channels."""
        return functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.new))


class Projection(nn.Sequential):
    """The shortcut with parameters: a 1 x 1 convolution."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__(nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width))


def conv3x3(before: int, width: int, stride: int = 1) -> nn.Conv2d:
    """Return a convolution that keeps height and width, or divides them by `stride`."""
    return nn.Conv2d(before, width, 3, stride, padding=1, bias=False)
