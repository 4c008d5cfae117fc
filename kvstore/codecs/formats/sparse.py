"""The base of codecs that send some of the elements, exactly: payloads of positions and values.

A payload has the positions of the elements within the range, int32 and increasing, then as many float32 values. If half
of a range or more is sent, its payload has all its float32 values instead, which are fewer bytes; the length says which
it is. Elements are sent exactly, so their error is 0.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import partial

import numpy as np
import torch

from kvstore.codecs import host
from kvstore.codecs.base import CheckedPayload, Codec, Encoded, put_or_add, typed
from kvstore.codecs.host import Native
from kvstore.codecs.memo import Memo
from kvstore.errors import UsageError, WireError

_PAIR = 8  # bytes of a position and a value
_LONGEST = 2**31 - 1
_NO_POSITIONS: Native = np.empty(0, np.int64)
_NO_VALUES: Native = np.empty(0, np.float32)


class SparseCodec(Codec):
    """A codec that chooses which elements are sent."""

    whole = True

    @abstractmethod
    def choose(self, values: torch.Tensor, memo: Memo) -> torch.Tensor:
        """Return the positions of the elements to send: int64 and increasing. ``values`` is not empty."""

    def begin(self, shape: torch.Size, device: torch.device, memo: Memo) -> Encoded:
        """See ``Codec``."""
        return _Sparse(self, shape.numel(), memo)

    def _check(self, payload: torch.Tensor, count: int) -> CheckedPayload:
        if payload.numel() == 4 * count:
            return CheckedPayload(partial(put_or_add, typed(payload, torch.float32)))
        chosen, rest = divmod(payload.numel(), _PAIR)
        if rest or _PAIR * chosen >= 4 * count:
            raise WireError(f"a payload of {payload.numel()} bytes for some of {count} elements")
        where = typed(payload[: 4 * chosen], torch.int32)
        values = typed(payload[4 * chosen :], torch.float32)
        if chosen:
            positions = where.numpy()
            if positions[0] < 0 or positions[-1] >= count or not (positions[1:] > positions[:-1]).all():
                raise WireError(f"a payload whose positions do not increase from 0 to below {count}")
        return CheckedPayload(partial(_scatter, where, values))


def _scatter(where: torch.Tensor, values: torch.Tensor, target: torch.Tensor, add: bool) -> None:
    if add:
        target.index_add_(0, where, values)
    else:
        target.zero_().index_copy_(0, where.long(), values)


class _Sparse(Encoded):
    def __init__(self, codec: SparseCodec, size: int, memo: Memo) -> None:
        super().__init__(size)
        self._codec, self._memo = codec, memo
        self._positions, self._values = _NO_POSITIONS, _NO_VALUES

    @property
    def nbytes(self) -> int:
        return min(_PAIR * len(self._positions), 4 * self.size)

    def put(self, number: int, values: torch.Tensor) -> None:
        self._positions = host.native(self._codec.choose(values, self._memo))
        self._values = host.native(values)[self._positions]

    def take(self, number: int, values: torch.Tensor, left: torch.Tensor) -> None:
        self.put(number, values)
        if left is not values:
            left.copy_(values)
        self.clear(left)

    def clear(self, values: torch.Tensor) -> None:
        host.native(values)[self._positions] = 0.0

    def finish(self) -> None:
        if isinstance(self._positions, torch.Tensor):
            self._positions, self._values = self._positions.cpu().numpy(), self._values.cpu().numpy()

    def _payload(self, start: int, stop: int) -> torch.Tensor:
        if stop - start > _LONGEST:
            raise UsageError(f"a segment of {stop - start} elements is too long: positions have 31 bits")
        low, high = np.searchsorted(self._positions, (start, stop))
        where, values = self._positions[low:high] - start, self._values[low:high]
        count = len(where)
        if _PAIR * count < 4 * (stop - start):
            payload = np.empty(2 * count, np.float32)
            payload[:count].view(np.int32)[:] = where
            payload[count:] = values
        else:
            payload = np.zeros(stop - start, np.float32)
            payload[where] = values
        return torch.from_numpy(payload.view(np.uint8))
