"""Half the bytes: float16, which is more precise, and bfloat16, which has float32's range.

A value beyond the largest finite one is clipped to it and counted. The rest is sent in later rounds, as any error is.
Rounding to nearest leaves an error that float32 represents exactly, so nothing is lost: the rounded value and the error
are multiples of the last place of the input (up to 2^29 for values that float16 clips).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvstore.codecs import host
from kvstore.codecs.base import put_or_add
from kvstore.codecs.formats.planes import Plane, PlaneCodec
from kvstore.codecs.noise import Noise
from kvstore.codecs.scratch import scratch


class _Half(PlaneCodec):
    single = True

    def __init__(self) -> None:
        super().__init__()
        self._top = torch.finfo(self.planes[0].dtype).max

    def pack(self, values: torch.Tensor, planes: Sequence[torch.Tensor], noise: Noise | None) -> int:
        """See ``PlaneCodec``."""
        top = self._top
        low, high = host.extremes(values)
        clipped = 0
        if low < -top or high > top:
            clipped = int((values.abs() > top).sum())
            values = torch.clamp(values, -top, top, out=scratch("clipped", values))
        planes[0].copy_(values)
        return clipped

    def unpack(self, planes: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """See ``PlaneCodec``."""
        out.copy_(planes[0])

    def take(
        self, values: torch.Tensor, planes: Sequence[torch.Tensor], noise: Noise | None, left: torch.Tensor
    ) -> int:
        """See ``PlaneCodec``."""
        clipped = self.pack(values, planes, noise)
        torch.sub(values, planes[0], out=left)
        return clipped

    def add(self, planes: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """See ``PlaneCodec``."""
        out.add_(planes[0])

    def write(self, planes: Sequence[torch.Tensor], before: int, target: torch.Tensor, add: bool) -> None:
        """See ``PlaneCodec``. One operation does all of it, so chunks would not help."""
        put_or_add(planes[0], target, add)

    def spread(self, planes: Sequence[torch.Tensor], before: int, targets: Sequence[torch.Tensor]) -> None:
        """See ``PlaneCodec``."""
        torch._foreach_copy_(list(targets), planes[0].split_with_sizes([target.numel() for target in targets]))


class Float16(_Half):
    """IEEE half precision: 11 significant bits, up to 65504."""

    planes = (Plane(torch.float16, 1),)


class BFloat16(_Half):
    """The upper half of a float32: 8 significant bits."""

    planes = (Plane(torch.bfloat16, 1),)
