"""Which elements are sent: the largest, those that reach a threshold, or some at random.

The first two are SINGA's ways to make gradients sparse. With momentum correction, momentum factor masking and warm-up
they are Deep Gradient Compression (arXiv:1712.01887).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from functools import partial

import numpy as np
import torch

from kvstore.codecs import codec
from kvstore.codecs.codec import (
    CHUNK,
    CheckedPayload,
    Codec,
    Encoded,
    Memo,
    Native,
    chunks,
    native,
    put_or_add,
    scratch,
    typed,
)
from kvstore.errors import UsageError, WireError

_FIRST_RATIO = 0.25  # of the elements, at the start of a warm-up
_SMALLEST = 2.0**-149  # the smallest positive float32
_SAMPLED = 64  # one in so many elements is in the sample that estimates how large the largest are

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

    def put(self, number: int, values: torch.Tensor) -> None:
        self._positions = native(self._codec.choose(values, self._memo))
        self._values = native(values)[self._positions]

    def take(self, number: int, values: torch.Tensor, left: torch.Tensor) -> None:
        self.put(number, values)
        if left is not values:
            left.copy_(values)
        self.clear(left)

    def clear(self, values: torch.Tensor) -> None:
        native(values)[self._positions] = 0.0

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


class TopK(SparseCodec):
    """The ``k`` elements, or a ``ratio`` of them but at least one, of largest magnitude. Zeros are not sent.

    During the first ``warmup_steps`` encodings of a key the number of elements falls exponentially from a quarter.
    """

    def __init__(self, ratio: float | None, k: int | None, warmup_steps: int) -> None:
        self.ratio, self.k, self.warmup_steps = ratio, k, warmup_steps

    def choose(self, values: torch.Tensor, memo: Memo) -> torch.Tensor:
        size = values.numel()
        k = count_to_send(size, self.ratio, self.k)
        first = count_to_send(size, _FIRST_RATIO, None)
        if memo.step < self.warmup_steps and first > k:
            k = max(k, math.ceil(first * (k / first) ** (memo.step / self.warmup_steps)))
        return largest(values, k)


class Threshold(SparseCodec):
    """The elements of magnitude ``threshold`` or more."""

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold

    def choose(self, values: torch.Tensor, memo: Memo) -> torch.Tensor:
        return at_least(values, self.threshold)


class RandomK(SparseCodec):
    """``k`` elements, or a ``ratio`` of them, at random: one from each of so many ranges of nearly equal length.

    Workers with the same ``seed`` choose the same elements, so that the sum of what they send is as sparse.
    """

    def __init__(self, ratio: float | None, k: int | None, seed: int) -> None:
        self.ratio, self.k, self.seed = ratio, k, seed

    def choose(self, values: torch.Tensor, memo: Memo) -> torch.Tensor:
        size = values.numel()
        k = count_to_send(size, self.ratio, self.k)
        edges = torch.arange(k + 1, dtype=torch.int64, device="cpu").mul_(size).div_(k, rounding_mode="floor")
        lengths = edges.diff()
        draws = memo.noise(self.seed).uniform(k)
        return (edges[:-1] + (draws * lengths).long()).to(values.device)


def count_to_send(size: int, ratio: float | None, k: int | None) -> int:
    """Return how many of ``size`` elements to send: ``k``, or a ``ratio`` of them rounded up; at least one."""
    wanted = k if k is not None else math.ceil(round((ratio or 0.0) * size, 6))
    return min(max(1, wanted), size)


def largest(values: torch.Tensor, k: int) -> torch.Tensor:
    """Return the positions, increasing, of the ``k`` elements of largest magnitude; of fewer if the others are 0.

    Of equal elements the first are taken; CUDA may take others.
    """
    if not codec.on_host(values):
        chosen = torch.topk(values.abs(), k, sorted=False).indices.sort().values
        return chosen[values[chosen] != 0]
    # Only the elements that reach an estimate are partitioned. Numpy's partition is ten times as fast as torch's topk.
    candidates = at_least(values, _estimate(values, k))
    if candidates.numel() < k:
        candidates = at_least(values, _SMALLEST)
    magnitudes = np.abs(values.numpy().take(candidates.numpy()))  # in a fifth of the time of torch's indexing
    if len(magnitudes) <= k:
        return candidates
    last = np.partition(magnitudes, len(magnitudes) - k)[len(magnitudes) - k]
    taken = magnitudes > last
    taken[np.flatnonzero(magnitudes == last)[: k - np.count_nonzero(taken)]] = True
    return torch.from_numpy(candidates.numpy().compress(taken))


def at_least(values: torch.Tensor, bound: float) -> torch.Tensor:
    """Return the positions, increasing, of the elements of magnitude ``bound`` or more."""
    if not codec.on_host(values):
        return (values.abs() >= bound).nonzero().view(-1)
    positions = []
    for number, chunk in enumerate(chunks(values)):
        magnitudes = torch.abs(chunk, out=scratch("decoded", chunk)).numpy()
        positions.append((magnitudes >= np.float32(bound)).nonzero()[0] + number * CHUNK)
    return torch.from_numpy(positions[0] if len(positions) == 1 else np.concatenate(positions))


def _estimate(values: torch.Tensor, k: int) -> float:
    """Return a magnitude that a few more than ``k`` elements probably reach; the smallest, if a sample cannot tell."""
    rank = int(1.2 * k / _SAMPLED) + 32
    if rank * _SAMPLED >= values.numel():
        return _SMALLEST
    sample = values[::_SAMPLED].abs().numpy()
    return max(_SMALLEST, float(np.partition(sample, len(sample) - rank)[len(sample) - rank]))
