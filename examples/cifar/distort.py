"""Augmentation of MXNet's lab besides crops and mirrors: rotation, shear, aspect, scale and color.

Each function takes and returns bytes (N x 3 x height x width). Every image gets its own random numbers.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor
from torch.nn import functional

HUES, LEVELS = 180, 255  # OpenCV's units of hue, and of saturation and lightness; the options are in these


def affine(
    pictures: Tensor,
    generator: Generator | None,
    *,
    angle: float = 0,
    shear: float = 0,
    aspect: float = 0,
    scale: tuple[float, float] = (1, 1),
) -> Tensor:
    """Rotate each image by up to `angle` degrees, shear it, stretch it to an aspect of 1 ± `aspect`, and scale it.

    The same as MXNet's `ImageRecordIter`. Pixels from outside of the image are black.
    """
    turn, slant, ratio, size = torch.rand(4, len(pictures), generator=generator)
    turn = (2 * turn - 1) * angle * torch.pi / 180
    slant = (2 * slant - 1) * shear
    ratio = 1 + (2 * ratio - 1) * aspect
    size = scale[0] + (scale[1] - scale[0]) * size
    tall = 2 * size / (1 + ratio)
    wide = ratio * tall
    cos, sin = turn.cos(), turn.sin()
    forward = torch.stack(
        [
            torch.stack([tall * cos - slant * sin * wide, tall * sin + slant * cos * wide], 1),
            torch.stack([-sin * wide, cos * wide], 1),
        ],
        1,
    )
    window = torch.cat([torch.linalg.inv(forward), torch.zeros(len(pictures), 2, 1)], 2)
    grid = functional.affine_grid(window, list(pictures.shape), align_corners=False)
    return _bytes(functional.grid_sample(pictures.float(), grid, align_corners=False), pictures)


def recolor(
    pictures: Tensor, generator: Generator | None, *, hue: float = 0, saturation: float = 0, lightness: float = 0
) -> Tensor:
    """Shift the hue, saturation and lightness of each image by up to the given amounts, in OpenCV's units."""
    by = (2 * torch.rand(3, len(pictures), 1, 1, generator=generator) - 1) * torch.tensor(
        [hue / HUES, saturation / LEVELS, lightness / LEVELS]
    ).view(3, 1, 1, 1)
    rgb = pictures.float() / 255
    red, green, blue = rgb.unbind(1)
    high, low = rgb.amax(1), rgb.amin(1)
    spread = high - low
    divisor = spread.clamp(min=1e-6)
    sector = torch.where(
        high == red,
        (green - blue) / divisor,
        torch.where(high == green, 2 + (blue - red) / divisor, 4 + (red - green) / divisor),
    )
    light = (high + low) / 2
    strength = spread / (1 - (2 * light - 1).abs()).clamp(min=1e-6)
    h, s, l = sector / 6 + by[0], (strength + by[1]).clamp(0, 1), (light + by[2]).clamp(0, 1)  # noqa: E741
    reach = s * torch.minimum(l, 1 - l)
    channels = []
    for n in (0, 8, 4):  # red, green and blue
        k = (n + 12 * h) % 12
        channels.append(l - reach * torch.minimum(k - 3, 9 - k).clamp(-1, 1))
    return _bytes(255 * torch.stack(channels, 1), pictures)


def _bytes(changed: Tensor, pictures: Tensor) -> Tensor:
    return changed.round_().clamp_(0, 255).to(pictures.dtype)
