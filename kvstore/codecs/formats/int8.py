"""One byte for each element, and one float32 scale for 256 of them: 0.254 of float32's bytes.

With 256 elements to a scale, the scales cost 1.6 %, and one large element makes few others imprecise. Rounding to
nearest leaves an error of at most half a scale, which float32 represents exactly (a rounded value other than 0 is
between half and twice its input: Sterbenz). Stochastic rounding (QSGD, arXiv:1610.02132) is unbiased in every round.
Its error is up to one scale, and it costs random numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from kvstore.codecs import host
from kvstore.codecs.formats.planes import Plane, PlaneCodec
from kvstore.codecs.memo import Memo
from kvstore.codecs.noise import Noise
from kvstore.codecs.scratch import scratch
from kvstore.errors import WireError

BLOCK = 256
_LEVELS = 127
_MOST = 2.0**121  # the largest scale; 127 times as much is still a float32


class Int8(PlaneCodec):
    """Codes from -127 to 127: 127 for the largest magnitude of a block, 0 for zeros."""

    planes = (Plane(torch.float32, BLOCK), Plane(torch.int8, 1))

    def __init__(self, stochastic: bool, seed: int) -> None:
        super().__init__()
        self.stochastic, self.seed = stochastic, seed

    def noise(self, memo: Memo) -> Noise | None:
        """See ``PlaneCodec``."""
        return memo.noise(self.seed) if self.stochastic else None

    def pack(self, values: torch.Tensor, planes: Sequence[torch.Tensor], noise: Noise | None) -> int:
        """See ``PlaneCodec``."""
        scales, codes = planes
        quotients = scratch("quotients", values)
        for blocks, scale, quotient in _blocks(values, scales, quotients):
            torch.maximum(blocks.amax(1), blocks.amin(1).neg_(), out=scale)
            scale.div_(_LEVELS).clamp_(max=_MOST)
            # Where a scale is 0, so are all values. Where it is tiny, quotients may be out of range, and are clamped.
            torch.div(blocks, (scale + (scale == 0)).unsqueeze(1), out=quotient)
        if noise is None:
            quotients.round_()
        else:
            drawn = scratch("noise", values)
            noise.fill(drawn)
            quotients.add_(drawn).floor_()
        codes.copy_(quotients.clamp_(-_LEVELS, _LEVELS))
        return 0

    def unpack(self, planes: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """See ``PlaneCodec``."""
        scales, codes = planes
        out.copy_(codes[: out.numel()])
        for blocks, scale, _ in _blocks(out, scales, out):
            blocks.mul_(scale.unsqueeze(1))

    def check_planes(self, planes: Sequence[torch.Tensor]) -> None:
        """See ``PlaneCodec``."""
        low, high = host.extremes(planes[0])
        if not 0 <= low <= high <= _MOST:
            raise WireError(f"expected scales from 0 to {_MOST:g}, got a payload with scales from {low} to {high}")


def _blocks(
    values: torch.Tensor, scales: torch.Tensor, others: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield ``values``, their scales and ``others`` in rows of one block each: all full blocks, then the last one."""
    full = values.numel() // BLOCK
    edge = full * BLOCK
    if full:
        yield values[:edge].view(full, BLOCK), scales[:full], others[:edge].view(full, BLOCK)
    if edge < values.numel():
        yield values[edge:].view(1, -1), scales[full : full + 1], others[edge:].view(1, -1)
