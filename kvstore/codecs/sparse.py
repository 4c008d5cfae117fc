"""A part of the elements, as they are: payloads of their positions and values.

A payload is the positions within the segment, int32 and growing, then as many float32 values. A segment of which half
or more is sent goes as all its float32 values instead, which is less; the length says which. What is sent is exact, so
what is kept of it is 0.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import partial

import numpy as np
import torch

from kvstore.codecs.base import Codec, Encoded, Opened, joined, put_or_add, typed
from kvstore.codecs.memo import Memo
from kvstore.errors import UsageError, WireError

_PAIR = 8  # bytes of a position and a value
_LONGEST = 2**31 - 1


class SparseCodec(Codec):
    """A codec that chooses elements."""

    whole = True

    @abstractmethod
    def choose(self, values: torch.Tensor, memo: Memo) -> torch.Tensor:
        """Return the positions of the elements of ``values``, of which there are some, to send: int64 and growing."""

    def begin(self, shape: torch.Size, device: torch.device, memo: Memo) -> Encoded:
        """See ``Codec``."""
        return _Sparse(self, shape.numel(), memo)

    def _open(self, payload: torch.Tensor, count: int) -> Opened:
        if payload.numel() == 4 * count:
            return partial(put_or_add, typed(payload, torch.float32))
        chosen, rest = divmod(payload.numel(), _PAIR)
        if rest or _PAIR * chosen >= 4 * count:
            raise WireError(f"a payload of {payload.numel()} bytes for chosen ones of {count} elements")
        where = typed(payload[: 4 * chosen], torch.int32)
        values = typed(payload[4 * chosen :], torch.float32)
        if chosen:
            positions = where.numpy()
            if positions[0] < 0 or positions[-1] >= count or not (positions[1:] > positions[:-1]).all():
                raise WireError(f"a payload whose positions do not grow from 0 to {count}")
        return partial(_scatter, where, values)


def _scatter(where: torch.Tensor, values: torch.Tensor, target: torch.Tensor, add: bool) -> None:
    if add:
        target.index_add_(0, where, values)
    else:
        target.zero_().index_copy_(0, where.long(), values)


class _Sparse(Encoded):
    def __init__(self, codec: SparseCodec, size: int, memo: Memo) -> None:
        super().__init__(size)
        self._codec, self._memo = codec, memo
        self._positions = torch.empty(0, dtype=torch.int64)
        self._values = torch.empty(0)

    @property
    def nbytes(self) -> int:
        return min(_PAIR * self._positions.numel(), 4 * self.size)

    def put(self, start: int, values: torch.Tensor) -> None:
        self._positions = self._codec.choose(values, self._memo)
        self._values = values.index_select(0, self._positions)

    def take(self, start: int, values: torch.Tensor) -> None:
        self.put(start, values)
        self.clear(values)

    def clear(self, values: torch.Tensor) -> None:
        values.index_fill_(0, self._positions, 0.0)

    def finish(self) -> None:
        self._positions, self._values = self._positions.cpu(), self._values.cpu()

    def _cut(self, start: int, stop: int) -> torch.Tensor:
        if stop - start > _LONGEST:
            raise UsageError(f"a segment of {stop - start} elements; positions have 31 bits")
        low, high = np.searchsorted(self._positions.numpy(), (start, stop))
        where, values = self._positions[low:high] - start, self._values[low:high]
        if _PAIR * where.numel() < 4 * (stop - start):
            return joined([where.to(torch.int32), values])
        return joined([torch.zeros(stop - start).index_copy_(0, where, values)])
