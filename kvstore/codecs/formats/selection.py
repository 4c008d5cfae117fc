"""Which elements are sent: the largest, those that reach a threshold, or some at random.

The first two are SINGA's ways to make gradients sparse. With momentum correction, momentum factor masking and warm-up
they are Deep Gradient Compression (arXiv:1712.01887).
"""

from __future__ import annotations

import math

import numpy as np
import torch

from kvstore.codecs import host
from kvstore.codecs.base import CHUNK, chunks
from kvstore.codecs.formats.sparse import SparseCodec
from kvstore.codecs.memo import Memo
from kvstore.codecs.scratch import scratch

_FIRST_RATIO = 0.25  # of the elements, at the start of a warm-up
_SMALLEST = 2.0**-149  # the smallest positive float32
_SAMPLED = 64  # one in so many elements is in the sample that estimates how large the largest are


class TopK(SparseCodec):
    """The ``k`` elements, or a ``ratio`` of them but at least one, of largest magnitude. Zeros are not sent.

    During the first ``warmup_steps`` encodings of a key the number of elements falls exponentially from a quarter.
    """

    def __init__(self, ratio: float | None, k: int | None, warmup_steps: int) -> None:
        self.ratio, self.k, self.warmup_steps = ratio, k, warmup_steps

    def choose(self, values: torch.Tensor, memo: Memo) -> torch.Tensor:
        """See ``SparseCodec``."""
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
        """See ``SparseCodec``."""
        return at_least(values, self.threshold)


class RandomK(SparseCodec):
    """``k`` elements, or a ``ratio`` of them, at random: one from each of so many ranges of nearly equal length.

    Workers with the same ``seed`` choose the same elements, so that the sum of what they send is as sparse.
    """

    def __init__(self, ratio: float | None, k: int | None, seed: int) -> None:
        self.ratio, self.k, self.seed = ratio, k, seed

    def choose(self, values: torch.Tensor, memo: Memo) -> torch.Tensor:
        """See ``SparseCodec``."""
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
    if not host.on_host(values):
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
    if not host.on_host(values):
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
