"""Compression at a server: contributions stay encoded until they are summed; replies are encoded once for all."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kvstore import wire
from kvstore.codecs import CLOSE, CheckedPayload, Compression, Compressor, Encoded
from kvstore.codecs.description import travelling
from kvstore.codecs.payloads import check_payloads
from kvstore.errors import UsageError
from kvstore.spec import FLOATS, Key, sum_dtype
from kvstore.values import PayloadRange, TensorRange, one_thread, to_buffer
from servers.store.recording import Recording
from servers.store.target import Bucket


@dataclass(frozen=True)
class CompressedSegments:
    """Elements ``start`` to ``stop`` of a contribution, as they were sent: decoded when summed. A ``PayloadRange``."""

    start: int
    stop: int
    payload: CheckedPayload

    @property
    def values(self) -> torch.Tensor:
        """The elements, in new memory."""
        out = torch.empty(self.stop - self.start, dtype=torch.float32, device="cpu")
        self.write(out, False)
        return out

    def cut(self, start: int, stop: int) -> PayloadRange:
        """See ``PayloadRange``. Buckets are divided between segments; another worker's buffers may end within one."""
        if start <= self.start and self.stop <= stop:
            return CompressedSegments(self.start - start, self.stop - start, self.payload)
        return TensorRange(self.start, self.values).cut(start, stop)

    def write(self, out: torch.Tensor, add: bool) -> None:
        """See ``PayloadRange``."""
        with one_thread():  # codecs work in chunks, for which to wake other threads takes longer than the work
            self.payload.write(out, add)


def contribution(message: wire.Push, compression: Compression, buckets: Sequence[Bucket]) -> Sequence[PayloadRange]:
    """Return the elements of a compressed push, checked.

    Raises:
        UsageError: the segments are not of floating point.
        WireError: a payload is not that of its segments.
    """
    dtype = buckets[0].dtype
    if dtype not in FLOATS:
        raise UsageError(f"compressed values for segments of {dtype}; compression is for floating point only")
    payloads = check_payloads(compression, message, [size for bucket in buckets for size in bucket.sizes])
    starts = itertools.accumulate((size for size, _ in payloads), initial=0)
    parts = [
        CompressedSegments(start, start + size, payload)
        for start, (size, payload) in zip(starts, payloads, strict=False)
        if size
    ]
    if sum_dtype(dtype) == "float32":  # of half precision, too: what is decoded is rounded with the sum
        return parts
    return [TensorRange(part.start, part.values.to(getattr(torch, dtype))) for part in parts]


class CompressedReplies:
    """The compressed values that one store's workers are sent. Each value is encoded once, however many ask for it.

    Sums that are assigned are encoded with error feedback (DoubleSqueeze, arXiv:1905.05957): the residual stays here,
    and is added to the next sum. Weights are encoded without, for the next weights do not add to these.

    Args:
        key: returns the key of a segment, by its id.
        recording: of the store.

    Attributes:
        encoders: what encodes, by compression.
    """

    def __init__(self, key: Callable[[int], Key], recording: Recording | None = None) -> None:
        self._key = key
        self._recording = recording or Recording()
        self.encoders: dict[Compression, ReplyEncoder] = {}

    def payloads(
        self, ranges: Sequence[tuple[Bucket, int, int]], compression: Compression, feedback: bool
    ) -> tuple[list[int], list[int], list[wire.Buffer]]:
        """Return the payloads of segments: their lengths, how many segments each is of, and a message's buffers.

        Args:
            ranges: the segments; see ``Buckets.segment_ranges``.
            compression: how to encode.
            feedback: whether the values are sums, and are encoded with error feedback.

        Raises:
            UsageError: the compression is right for sums only, and these are weights.
        """
        if not feedback and compression.type not in CLOSE:
            raise UsageError(
                f"{compression.type} compression is for sums, not for weights: single weights would be far off; "
                f"choose from {', '.join(sorted(CLOSE))}"
            )
        encoder = self.encoder(compression)
        if feedback and self._recording.on and any(encoder.lacking(*part, feedback=True) for part in ranges):
            ids = [number for bucket, first, stop in ranges for number in bucket.ids[first:stop]]
            self._recording.encoded(ids, travelling(compression))
        chosen = [segments for part in ranges for segments in encoder.encoded(*part, feedback)]
        parts = [to_buffer(segments.encoding.payload(segments.start, segments.stop)) for segments in chosen]
        return [part.nbytes for part in parts], [segments.number for segments in chosen], wire.pack_arrays(parts)

    def encoder(self, compression: Compression) -> ReplyEncoder:
        """Return what encodes with ``compression``."""
        encoder = self.encoders.get(compression)
        if encoder is None:
            encoder = self.encoders[compression] = ReplyEncoder(Compressor(compression, self._key))
        return encoder


class _EncodedSegments(NamedTuple):
    """``number`` segments: elements ``start`` to ``stop`` of an encoding."""

    encoding: Encoded
    start: int
    stop: int
    number: int = 1


_NEVER = (None, None)


class _KeptPayload(Encoded):
    """A payload that another server has made."""

    def __init__(self, payload: torch.Tensor, size: int) -> None:
        super().__init__(size)
        self._whole = payload

    @property
    def nbytes(self) -> int:
        return self._whole.numel()

    def _payload(self, start: int, stop: int) -> torch.Tensor:
        return self._whole

    def put(self, number: int, values: torch.Tensor) -> None:
        raise AssertionError("it is encoded already")

    def take(self, number: int, values: torch.Tensor, left: torch.Tensor) -> None:
        raise AssertionError("it is encoded already")

    def finish(self) -> None:
        """Do nothing."""


class ReplyEncoder:
    """Encodes with one compression, and keeps the last encoding of each segment.

    Attributes:
        compressor: keeps the residuals.
    """

    def __init__(self, compressor: Compressor) -> None:
        self.compressor = compressor
        self._last: dict[int, tuple[object, _EncodedSegments]] = {}  # by segment: the state that was encoded, and where

    def encoded(self, bucket: Bucket, first: int, stop: int, feedback: bool) -> list[_EncodedSegments]:
        """Return the segments at places ``first`` to ``stop`` of a bucket; neighbors in an encoding are one."""
        state = _state(bucket, feedback)
        new = self.lacking(bucket, first, stop, feedback)
        if 1 < len(new) == len(bucket.ids) and self.compressor.joins:
            self._keep(bucket, new, state, self._encode_all(bucket, feedback))
        else:
            for place in new:
                self._keep(bucket, [place], state, self._encode_one(bucket, place, feedback))
        chosen: list[_EncodedSegments] = []
        for number in bucket.ids[first:stop]:
            segment = self._last[number][1]
            if chosen and chosen[-1].encoding is segment.encoding and chosen[-1].stop == segment.start:
                before = chosen.pop()
                segment = _EncodedSegments(segment.encoding, before.start, segment.stop, before.number + 1)
            chosen.append(segment)
        return chosen

    def kept(self, buckets: Iterable[Bucket]) -> dict[int, tuple[int, torch.Tensor]]:
        """Return, by segment, the last round whose sums were encoded, where no later one is over, and the payload."""
        kept: dict[int, tuple[int, torch.Tensor]] = {}
        for bucket in buckets:
            for number in bucket.ids:
                version, segment = self._last.get(number, _NEVER)
                if type(version) is int and version == bucket.rounds.version and segment is not None:
                    kept[number] = version, segment.encoding.payload(segment.start, segment.stop)
        return kept

    def restore(self, number: int, size: int, version: int, payload: torch.Tensor) -> None:
        """Have ``payload`` as the encoding of segment ``number``, of ``size`` elements, of round ``version``."""
        self._last[number] = version, _EncodedSegments(_KeptPayload(payload, size), 0, size)

    def lacking(self, bucket: Bucket, first: int, stop: int, feedback: bool) -> list[int]:
        """Return the places from ``first`` to ``stop`` whose values now have not been encoded yet."""
        state = _state(bucket, feedback)
        return [place for place in range(first, stop) if self._last.get(bucket.ids[place], _NEVER)[0] != state]

    def _keep(self, bucket: Bucket, places: Sequence[int], state: object, encoding: Encoded) -> None:
        start = 0
        for place in places:
            stop = start + bucket.sizes[place]
            self._last[bucket.ids[place]] = state, _EncodedSegments(encoding, start, stop)
            start = stop

    @one_thread()
    def _encode_all(self, bucket: Bucket, feedback: bool) -> Encoded:
        if feedback:
            return self.compressor.encode_joined(bucket.ids, bucket.sizes, bucket.value)
        try:
            return self.compressor.encode_without_feedback(bucket.ids[0], bucket.value)
        except UsageError:
            for place in range(len(bucket.ids)):
                self._encode_one(bucket, place, feedback)  # raises an error that names the key at fault
            raise

    @one_thread()
    def _encode_one(self, bucket: Bucket, place: int, feedback: bool) -> Encoded:
        encode = self.compressor.encode if feedback else self.compressor.encode_without_feedback
        start = bucket.starts[place]
        return encode(bucket.ids[place], bucket.value[start : start + bucket.sizes[place]])


def _state(bucket: Bucket, feedback: bool) -> object:
    """Return what differs when the values of ``bucket`` have changed.

    Sums change with their round, wherever the segment is by then; weights may be changed in between.
    """
    return bucket.rounds.version if feedback else bucket.state
