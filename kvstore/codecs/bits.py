"""MXNet's one and two bits an element: above or below, and up, down or neither.

What is kept of a value is that value less a fixed step, which float32 rounds: exactly what is there where the step is a
power of two and values are of its order, else to half a unit of the last place.

Two bits are two planes of one bit, ups and downs, not codes side by side: numpy compares into masks, packs masks and
unpacks them at ten times the speed of torch's comparisons, or of looking up what a byte stands for. (A chunk, on one
core: numpy's greater, packbits and unpackbits 3 µs each; torch's gt 33 µs, index_select 30 µs; numpy's take 11 µs.)
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from kvstore.codecs import host
from kvstore.codecs.noise import Noise
from kvstore.codecs.planes import Plane, PlaneCodec
from kvstore.codecs.scratch import scratch
from kvstore.errors import WireError

_BITS = (128, 64, 32, 16, 8, 4, 2, 1)  # the first element has the highest bit, as in numpy


class _Signs(PlaneCodec):
    """A ``step`` up, a step down, or neither.

    A plane is a mask. The multiple of a step by a sign is exact, so that it makes no difference where it is made.
    """

    step: float

    @abstractmethod
    def masks(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Return a bool for each of ``values`` for each plane."""

    @abstractmethod
    def signs(self, masks: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return 1, -1 or 0 for each element of ``masks``, int8, which may be overwritten."""

    def pack(self, values: torch.Tensor, planes: Sequence[torch.Tensor], noise: Noise | None) -> int:
        """See ``PlaneCodec``."""
        self._pack(values, planes)
        return 0

    def take(self, values: torch.Tensor, planes: Sequence[torch.Tensor], noise: Noise | None) -> int:
        """See ``PlaneCodec``."""
        masks = self._pack(values, planes)
        self._add(self.signs([mask.view(torch.int8) for mask in masks]), values, -self.step)
        return 0

    def unpack(self, planes: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """See ``PlaneCodec``."""
        out.copy_(self._unpacked_signs(planes, out))
        if self.step != 1:
            out.mul_(self.step)

    def add(self, planes: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """See ``PlaneCodec``."""
        self._add(self._unpacked_signs(planes, out), out, self.step)

    def _pack(self, values: torch.Tensor, planes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        masks = self.masks(values)
        for mask, plane in zip(masks, planes, strict=True):
            pack_bits(mask, plane)
        return masks

    def _unpacked_signs(self, planes: Sequence[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
        return self.signs([unpack_bits(plane, out.numel()) for plane in planes])

    @staticmethod
    def _add(signs: torch.Tensor, out: torch.Tensor, step: float) -> None:
        # As floats first: torch's addition of integers to floats takes twice as long as both.
        out.add_(scratch("decoded", out.numel(), out.device).copy_(signs), alpha=step)


class OneBit(_Signs):
    """+1 above ``threshold``, else -1, as MXNet 2.0 has it, whatever ``threshold`` is."""

    planes = (Plane(torch.uint8, 8),)
    step = 1.0

    def __init__(self, threshold: float) -> None:
        super().__init__()
        self.threshold = float(np.float32(threshold))

    def masks(self, values: torch.Tensor) -> list[torch.Tensor]:
        """See ``_Signs``."""
        return [_compare(np.greater, torch.gt, values, self.threshold)]

    def signs(self, masks: Sequence[torch.Tensor]) -> torch.Tensor:
        """See ``_Signs``."""
        (above,) = masks
        return above.add_(above).sub_(1)


class TwoBit(_Signs):
    """``threshold`` where a value reaches it, its negative where that is reached, else 0."""

    planes = (Plane(torch.uint8, 8), Plane(torch.uint8, 8))

    def __init__(self, threshold: float) -> None:
        super().__init__()
        self.step = float(np.float32(threshold))

    def masks(self, values: torch.Tensor) -> list[torch.Tensor]:
        """See ``_Signs``."""
        return [
            _compare(np.greater_equal, torch.ge, values, self.step),
            _compare(np.less_equal, torch.le, values, -self.step),
        ]

    def signs(self, masks: Sequence[torch.Tensor]) -> torch.Tensor:
        """See ``_Signs``."""
        ups, downs = masks
        return ups.sub_(downs)

    def check(self, planes: Sequence[torch.Tensor]) -> None:
        """See ``PlaneCodec``."""
        if bool((planes[0] & planes[1]).any()):
            raise WireError("a payload with elements that go both up and down")


def pack_bits(mask: torch.Tensor, out: torch.Tensor) -> None:
    """Write ``mask``, of bools, into the bytes of ``out``, eight to each; what the last byte has too many is 0."""
    if host.on_host(mask):
        out.copy_(torch.from_numpy(np.packbits(mask.numpy())))
        return
    pack_bits_anywhere(mask, out)


def pack_bits_anywhere(mask: torch.Tensor, out: torch.Tensor) -> None:
    """``pack_bits`` without numpy, for any device."""
    bits = torch.nn.functional.pad(mask.to(torch.uint8), (0, -mask.numel() % 8)).view(-1, 8)
    torch.sum(bits * torch.tensor(_BITS, dtype=torch.uint8, device=mask.device), 1, dtype=torch.uint8, out=out)


def unpack_bits(packed: torch.Tensor, count: int) -> torch.Tensor:
    """Return the first ``count`` bits of the bytes ``packed`` as int8, 0 or 1."""
    if host.on_host(packed):
        return torch.from_numpy(np.unpackbits(packed.numpy(), count=count).view(np.int8))
    return unpack_bits_anywhere(packed, count)


def unpack_bits_anywhere(packed: torch.Tensor, count: int) -> torch.Tensor:
    """``unpack_bits`` without numpy, for any device."""
    bits = packed.unsqueeze(1) & torch.tensor(_BITS, dtype=torch.uint8, device=packed.device)
    return (bits.view(-1)[:count] != 0).to(torch.int8)


def _compare(
    numpy_way: Callable[..., Any], torch_way: Callable[..., Any], values: torch.Tensor, bound: float
) -> torch.Tensor:
    """Which ``values`` compare so with ``bound``, as bools."""
    if host.on_host(values):
        return torch.from_numpy(numpy_way(values.numpy(), np.float32(bound)))
    mask: torch.Tensor = torch_way(values, bound)
    return mask
