"""Compressed values at a server: contributions stay so until their sum is made; what is asked for is encoded once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from kvstore.codecs import CLOSE, Compression, Compressor, Encoded, Opened, parse
from kvstore.codecs.payloads import opened_each
from kvstore.errors import UsageError
from kvstore.spec import FLOATS, Key
from kvstore.values import PayloadRange, TensorRange, to_buffer
from kvstore.wire import Buffer, Codec, Push, join
from servers.store.bucket import Bucket


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
    """Segments as they were sent: elements ``start`` to ``stop``, decoded when summed; see ``PayloadRange``."""

    start: int
    stop: int
    opened: Opened

    @property
    def values(self) -> torch.Tensor:
        """The elements, in new memory."""
        out = torch.empty(self.stop - self.start)
        self.opened.write(out, False)
        return out

    def cut(self, start: int, stop: int) -> PayloadRange:
        """See ``PayloadRange``. Buckets are cut between segments; another worker's buffers may end within one."""
        if start <= self.start and self.stop <= stop:
            return Packed(self.start - start, self.stop - start, self.opened)
        return TensorRange(self.start, self.values).cut(start, stop)

    def write(self, out: torch.Tensor, add: bool) -> None:
        """See ``PayloadRange``."""
        self.opened.write(out, add)


def contribution(message: Push, compression: Compression, buckets: Sequence[Bucket]) -> Sequence[PayloadRange]:
    """Return the elements of a compressed push, all checked.

    Raises:
        UsageError: these segments are no floats.
        WireError: a payload is not one of its segment.
    """
    dtype = buckets[0].dtype
    if dtype not in FLOATS:
        raise UsageError(f"compressed values for segments of {dtype}; only floats can be")
    ways = opened_each(compression, message, [size for bucket in buckets for size in bucket.sizes])
    starts = itertools.accumulate((size for size, _ in ways), initial=0)
    parts = [Packed(start, start + size, way) for start, (size, way) in zip(starts, ways, strict=False) if size]
    if dtype == "float32":
        return parts
    return [TensorRange(part.start, part.values.to(getattr(torch, dtype))) for part in parts]


class Squeezed:
    """What one store's workers have been sent, compressed: each value is encoded once, however many ask for it.

    Sums that are assigned are encoded with error feedback, which stays here (DoubleSqueeze, arXiv:1905.05957): what one
    answer lacks comes with the next value. Weights are not: they are the same weights next time.

    Args:
        key: whose the segment of a number is.
    """

    def __init__(self, key: Callable[[int], Key]) -> None:
        self._key = key
        self._ways: dict[Compression, _Way] = {}

    def answer(
        self, runs: Sequence[tuple[Bucket, int, int]], compression: Compression, feedback: bool
    ) -> tuple[list[int], list[int], list[Buffer]]:
        """Return the payloads of segments: the length of each, of how many it is, and the buffers of a message.

        Args:
            runs: where the segments are; see ``Buckets.runs``.
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
            way = self._ways[compression] = _Way(Compressor(compression, self._key))
        found = [cut for run in runs for cut in way.cuts(*run, feedback)]
        parts = [to_buffer(cut.encoded.cut(cut.start, cut.stop)) for cut in found]
        return [part.nbytes for part in parts], [cut.segments for cut in found], join(parts)


class _Cut(NamedTuple):
    """Elements ``start`` to ``stop`` of an encoding: so many segments."""

    encoded: Encoded
    start: int
    stop: int
    segments: int = 1


_NONE = (None, None)


class _Way:
    """One way of encoding, and the last encodings."""

    def __init__(self, compressor: Compressor) -> None:
        self._compressor = compressor
        self._kept: dict[int, tuple[object, _Cut]] = {}  # by segment: of which state, and where it is

    def cuts(self, bucket: Bucket, first: int, stop: int, feedback: bool) -> list[_Cut]:
        """Return where the segments at places ``first`` to ``stop`` of a bucket are, those back to back as one."""
        # Sums change with their round, wherever the segment is by then; weights may be changed in between.
        state = bucket.rounds.version if feedback else bucket.state
        new = [place for place in range(first, stop) if self._kept.get(bucket.ids[place], _NONE)[0] != state]
        if 1 < len(new) == len(bucket.ids) and self._compressor.joins:
            self._keep(bucket, new, state, self._joined(bucket, feedback))
        else:
            for place in new:
                self._keep(bucket, [place], state, self._single(bucket, place, feedback))
        found: list[_Cut] = []
        for number in bucket.ids[first:stop]:
            cut = self._kept[number][1]
            if found and found[-1].encoded is cut.encoded and found[-1].stop == cut.start:
                before = found.pop()
                cut = _Cut(cut.encoded, before.start, cut.stop, before.segments + 1)
            found.append(cut)
        return found

    def _keep(self, bucket: Bucket, places: Sequence[int], state: object, encoded: Encoded) -> None:
        start = 0
        for place in places:
            stop = start + bucket.sizes[place]
            self._kept[bucket.ids[place]] = state, _Cut(encoded, start, stop)
            start = stop

    def _joined(self, bucket: Bucket, feedback: bool) -> Encoded:
        if feedback:
            return self._compressor.encode_joined(bucket.ids, bucket.sizes, bucket.value)
        try:
            return self._compressor.once(bucket.ids[0], bucket.value)
        except UsageError:
            for place in range(len(bucket.ids)):
                self._single(bucket, place, feedback)  # the one that is at fault says so
            raise

    def _single(self, bucket: Bucket, place: int, feedback: bool) -> Encoded:
        encode = self._compressor.encode if feedback else self._compressor.once
        start = bucket.starts[place]
        return encode(bucket.ids[place], bucket.value[start : start + bucket.sizes[place]])
