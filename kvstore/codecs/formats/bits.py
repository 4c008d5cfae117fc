"""MXNet's one and two bits for each element: above or below; or up, down or neither.

The error of a value is the value less a fixed step. It is exact if the step is a power of two and the value is of its
order; else float32 rounds it, by up to half a unit of the last place.

Two bits are two planes of one bit each, for ups and for downs, not codes side by side. Numpy compares into masks, packs
masks and unpacks them ten times as fast as torch compares, or as a table is looked up. (Per chunk, on one core: numpy's
greater, packbits and unpackbits 3 µs each; torch's gt 33 µs, index_select 30 µs; numpy's take 11 µs.)
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
import torch

from kvstore.codecs import host
from kvstore.codecs.formats.planes import Plane, PlaneCodec
from kvstore.codecs.host import Native
from kvstore.codecs.noise import Noise
from kvstore.codecs.scratch import scratch
from kvstore.errors import WireError

_BITS = (128, 64, 32, 16, 8, 4, 2, 1)  # the first element has the highest bit, as in numpy


class _Signs(PlaneCodec):
    """A ``step`` up, a step down, or neither.

    A plane is a mask. The product of step and sign is exact, so every device computes the same. On the CPU masks and
    signs are numpy arrays, elsewhere tensors.
    """

    single = True
    step: float

    @abstractmethod
    def masks(self, values: torch.Tensor) -> list[Native]:
        """Return a bool for each of ``values`` for each plane."""

    @abstractmethod
    def signs(self, masks: Sequence[Native]) -> Native:
        """Return 1, -1 or 0 for each element of ``masks``, int8 of 0 and 1, which are overwritten."""

    def pack(self, values: torch.Tensor, planes: Sequence[torch.Tensor], noise: Noise | None) -> int:
        """See ``PlaneCodec``."""
        self._pack(values, planes)
        return 0

    def take(
        self, values: torch.Tensor, planes: Sequence[torch.Tensor], noise: Noise | None, left: torch.Tensor
    ) -> int:
        """See ``PlaneCodec``."""
        self._add(self.signs([_bytes(mask) for mask in self._pack(values, planes)]), values, -self.step, left)
        return 0

    def unpack(self, planes: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """See ``PlaneCodec``."""
        out.copy_(_tensor(self._unpacked_signs(planes, out)))
        if self.step != 1:
            out.mul_(self.step)

    def add(self, planes: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """See ``PlaneCodec``."""
        self._add(self._unpacked_signs(planes, out), out, self.step, out)

    def _pack(self, values: torch.Tensor, planes: Sequence[torch.Tensor]) -> list[Native]:
        masks = self.masks(values)
        for mask, plane in zip(masks, planes, strict=True):
            pack_bits(mask, plane)
        return masks

    def _unpacked_signs(self, planes: Sequence[torch.Tensor], out: torch.Tensor) -> Native:
        count = out.numel()
        return self.signs([unpack_bits(plane, count) for plane in planes])

    @staticmethod
    def _add(signs: Native, values: torch.Tensor, step: float, out: torch.Tensor) -> None:
        # As floats first: torch's addition of integers to floats takes twice as long as both.
        torch.add(values, scratch("decoded", values).copy_(_tensor(signs)), alpha=step, out=out)


class OneBit(_Signs):
    """+1 above ``threshold``, else -1, as MXNet 2.0 has it, whatever ``threshold`` is."""

    planes = (Plane(torch.uint8, 8),)
    step = 1.0

    def __init__(self, threshold: float) -> None:
        super().__init__()
        self.threshold = float(np.float32(threshold))

    def masks(self, values: torch.Tensor) -> list[Native]:
        """See ``_Signs``."""
        return [host.native(values) > self.threshold]

    def signs(self, masks: Sequence[Native]) -> Native:
        """See ``_Signs``."""
        (above,) = masks
        above += above
        above -= 1
        return above


class TwoBit(_Signs):
    """``threshold`` where a value reaches it, its negative where that is reached, else 0."""

    planes = (Plane(torch.uint8, 8), Plane(torch.uint8, 8))

    def __init__(self, threshold: float) -> None:
        super().__init__()
        self.step = float(np.float32(threshold))

    def masks(self, values: torch.Tensor) -> list[Native]:
        """See ``_Signs``."""
        array = host.native(values)
        return [array >= self.step, array <= -self.step]

    def signs(self, masks: Sequence[Native]) -> Native:
        """See ``_Signs``."""
        ups, downs = masks
        ups -= downs
        return ups

    def check_planes(self, planes: Sequence[torch.Tensor]) -> None:
        """See ``PlaneCodec``."""
        if bool((host.native(planes[0]) & host.native(planes[1])).any()):
            raise WireError("a payload with elements that go both up and down")


def _tensor(flags: Native) -> torch.Tensor:
    return torch.from_numpy(flags) if isinstance(flags, np.ndarray) else flags


def _bytes(mask: Native) -> Native:
    """Return the memory of bools as int8, 0 or 1."""
    return mask.view(np.int8 if isinstance(mask, np.ndarray) else torch.int8)


def pack_bits(mask: Native, out: torch.Tensor) -> None:
    """Write ``mask``, of bools, into the bytes of ``out``, eight to each; unused bits of the last byte are 0."""
    if isinstance(mask, np.ndarray):
        out.numpy()[:] = np.packbits(mask)
    else:
        pack_bits_anywhere(mask, out)


def pack_bits_anywhere(mask: torch.Tensor, out: torch.Tensor) -> None:
    """``pack_bits`` without numpy, for any device."""
    bits = torch.nn.functional.pad(mask.to(torch.uint8), (0, -mask.numel() % 8)).view(-1, 8)
    torch.sum(bits * torch.tensor(_BITS, dtype=torch.uint8, device=mask.device), 1, dtype=torch.uint8, out=out)


def unpack_bits(packed: torch.Tensor, count: int) -> Native:
    """Return the first ``count`` bits of the bytes ``packed`` as int8, 0 or 1."""
    if host.on_host(packed):
        return np.unpackbits(packed.numpy(), count=count).view(np.int8)
    return unpack_bits_anywhere(packed, count)


def unpack_bits_anywhere(packed: torch.Tensor, count: int) -> torch.Tensor:
    """``unpack_bits`` without numpy, for any device."""
    bits = packed.unsqueeze(1) & torch.tensor(_BITS, dtype=torch.uint8, device=packed.device)
    return (bits.view(-1)[:count] != 0).to(torch.int8)
