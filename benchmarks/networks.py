"""The parameter shapes of well-known networks, and single arrays of any size. Needs the standard library only."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

Shape = tuple[int, ...]

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}


def resnet50() -> list[Shape]:
    """ResNet-50 for ImageNet: 161 arrays, 25.6 million elements."""
    shapes: list[Shape] = [(64, 3, 7, 7), (64,), (64,)]
    width = 64
    for planes, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            for shape in ((planes, width, 1, 1), (planes, planes, 3, 3), (4 * planes, planes, 1, 1)):
                shapes += [shape, shape[:1], shape[:1]]
            if block == 0:
                shapes += [(4 * planes, width, 1, 1), (4 * planes,), (4 * planes,)]
            width = 4 * planes
    return [*shapes, (1000, 2048), (1000,)]


def vgg16() -> list[Shape]:
    """VGG-16: 32 arrays, 138 million elements."""
    shapes: list[Shape] = []
    width = 3
    for planes in (64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512):
        shapes += [(planes, width, 3, 3), (planes,)]
        width = planes
    return [*shapes, (4096, 25088), (4096,), (4096, 4096), (4096,), (1000, 4096), (1000,)]


def small() -> list[Shape]:
    """Two thousand arrays of 128 elements."""
    return [(128,)] * 2000


def many() -> list[Shape]:
    """A hundred thousand arrays of two elements."""
    return [(2,)] * 100_000


def tiny() -> list[Shape]:
    """One array of 1 KB."""
    return [(256,)]


def decoder(vocabulary: int = 151_936, width: int = 1024, layers: int = 28) -> list[Shape]:
    """A decoder of 0.6 billion elements, with the shapes of Qwen3-0.6B: 310 arrays."""
    layer: list[Shape] = [(width,), (2 * width, width), (width, width), (width, width), (128,), (128,)]
    layer += [(width, 2 * width), (width,), (3 * width, width), (3 * width, width), (width, 3 * width)]
    return [(vocabulary, width), *layer * layers, (width,)]


def small_decoder() -> list[Shape]:
    """The same with 20 million elements: fewer layers, a smaller vocabulary, half the width."""
    return decoder(16_384, 512, 3)


NETWORKS: dict[str, Callable[[], list[Shape]]] = {
    "resnet50": resnet50,
    "vgg16": vgg16,
    "small": small,
    "many": many,
    "tiny": tiny,
    "decoder": decoder,
    "small-decoder": small_decoder,
}


def shapes_of(name: str) -> list[Shape]:
    """Return the shapes of the float32 parameters that ``name`` stands for.

    Args:
        name: a network in ``NETWORKS``, or a size such as ``1KB``, ``40MB`` or ``1GB``: one array of so many bytes.

    Raises:
        ValueError: there is no such network; the message lists those there are.
    """
    if name in NETWORKS:
        return NETWORKS[name]()
    size = re.fullmatch(r"(\d+)([KMG]?)B", name)
    if size is None:
        raise ValueError(f"no network {name!r}; choose from {', '.join(NETWORKS)}, or a size such as 40MB")
    return [(max(1, int(size[1]) * _UNITS[size[2]] // 4),)]


def elements(shapes: list[Shape]) -> int:
    """Return the total number of elements."""
    return sum(math.prod(shape) for shape in shapes)
