"""Compressed values at a server: contributions stay so until their sum is made; what is asked for is encoded once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from kvstore.codecs import CLOSE, Compression, Compressor, Opened, parse
from kvstore.compression import opened_each
from kvstore.errors import UsageError
from kvstore.spec import FLOATS
from kvstore.values import Part, Run, to_buffer
from kvstore.wire import Buffer, Codec, Push, join
from servers.bucket import Bucket


def described(codec: Codec) -> Compression | None:
    """Return the compression that a message names.

    Raises:
        UsageError, UnknownName: it is none.
    """
    return None if codec is None else _parsed(codec[0], tuple((name, number) for name, number in codec[1]))


@lru_cache(maxsize=64)
def _parsed(kind: str, numbers: tuple[tuple[str, float | int | bool], ...]) -> Compression:
    return parse({"type": kind, **dict(numbers)})


@dataclass(frozen=True)
class Packed:
    """A segment as it was sent: elements from ``start`` to ``stop``, decoded when they are summed. See ``Part``."""

    start: int
    stop: int
    opened: Opened

    @property
    def values(self) -> torch.Tensor:
        """The elements, in new memory."""
        out = torch.empty(self.stop - self.start)
        self.opened(out, False)
        return out

    def cut(self, start: int, stop: int) -> Part:
        """See ``Part``. Buckets are cut between segments; another worker's buffers may end within one."""
        if start <= self.start and self.stop <= stop:
            return Packed(self.start - start, self.stop - start, self.opened)
        return Run(self.start, self.values).cut(start, stop)

    def write(self, out: torch.Tensor, add: bool) -> None:
        """See ``Part``."""
        self.opened(out, add)


def contribution(message: Push, compression: Compression, buckets: Sequence[Bucket]) -> Sequence[Part]:
    """Return the elements of a compressed push, all checked.

    Raises:
        UsageError: these segments are no floats.
        WireError: a payload is not one of its segment.
    """
    dtype = buckets[0].dtype
    if dtype not in FLOATS:
        raise UsageError(f"compressed values for segments of {dtype}; only floats can be")
    sizes = [size for bucket in buckets for size in bucket.sizes]
    starts = itertools.accumulate(sizes, initial=0)
    ways = opened_each(compression, message.buffers, message.lengths, sizes)
    parts = [Packed(start, start + size, way) for start, size, way in zip(starts, sizes, ways, strict=False) if size]
    if dtype == "float32":
        return parts
    return [Run(part.start, part.values.to(getattr(torch, dtype))) for part in parts]


class Squeezed:
    """What one store's workers have been sent, compressed: each value is encoded once, however many ask for it.

    Sums that are assigned are encoded with error feedback, which stays here (DoubleSqueeze, arXiv:1905.05957): what one
    answer lacks comes with the next value. Weights are not: they are the same weights next time.
    """

    def __init__(self) -> None:
        self._ways: dict[Compression, _Way] = {}

    def answer(
        self, places: Sequence[tuple[Bucket, int]], compression: Compression, feedback: bool
    ) -> tuple[list[int], list[Buffer]]:
        """Return the payloads of segments: the length of each, and the buffers of a message.

        Args:
            places: the bucket of each segment, and its place therein.
            compression: how.
            feedback: whether the values are sums, of which what is lacking must come later.

        Raises:
            UsageError: it is a way for sums, and these are weights.
        """
        if not feedback and compression.type not in CLOSE:
            raise UsageError(
                f"{compression.type} is no way for weights to come back, of which every one must be near; "
                f"choose from {', '.join(sorted(CLOSE))}"
            )
        way = self._ways.get(compression)
        if way is None:
            way = self._ways[compression] = _Way(Compressor(compression))
        parts = [to_buffer(way.payload(bucket, place, feedback)) for bucket, place in places]
        return [part.nbytes for part in parts], join(parts)


class _Way:
    """One way of encoding, and the last payloads."""

    def __init__(self, compressor: Compressor) -> None:
        self._compressor = compressor
        self._kept: dict[int, tuple[object, torch.Tensor]] = {}  # by segment: of which state, and the payload

    def payload(self, bucket: Bucket, place: int, feedback: bool) -> torch.Tensor:
        number, start = bucket.ids[place], bucket.starts[place]
        # Sums change with their round, wherever the segment is by then; weights may be changed in between.
        state = bucket.rounds.version if feedback else bucket.state
        kept = self._kept.get(number)
        if kept is not None and kept[0] == state:
            return kept[1]
        encode = self._compressor.encode if feedback else self._compressor.once
        encoded = encode(number, bucket.value[start : start + bucket.sizes[place]])
        payload = encoded.cut(0, encoded.size)
        self._kept[number] = (state, payload)
        return payload
