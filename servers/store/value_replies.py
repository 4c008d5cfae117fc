"""Answers that bring the values of segments: plain ones refer to the buckets' memory, others are compressed. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch

from kvstore import wire
from kvstore.codecs import CLOSE, Compression, Compressor, Encoded
from kvstore.codecs.options import described, travelling
from kvstore.errors import UsageError
from kvstore.rule import Rule
from kvstore.values import one_thread, to_buffer
from servers.store.array_updates import Updates
from servers.store.bucket import Bucket
from servers.store.buckets import Buckets
from servers.store.recording import Recording


class ValueReplies:
    """Makes the answers of one store. Each value is encoded once, however many workers ask for it."""

    def __init__(self, rule: Rule, buckets: Buckets, updates: Updates, recording: Recording) -> None:
        self.encoders: dict[Compression, ReplyEncoder] = {}
        self._rule = rule
        self._buckets = buckets
        self._updates = updates
        self._recording = recording

    def reply(self, message: wire.Push | wire.Pull, late: int, ahead: int) -> wire.Values | wire.Ack:
        """Return the answer to a request that need not wait.

        ``late`` of its segments came after their round was over. The asker is so many pushes ``ahead`` of the slowest
        worker.
        """
        if isinstance(message, wire.Push) and not message.want:
            return wire.Ack(message.seq, late)
        if self._rule.compensation:
            self.remember(message.ids, message.workers)
        back = described(message.back)
        lengths: list[int] = []
        segment_counts: list[int] = []
        ranges: Sequence[tuple[Bucket, int, int]] = []
        if back is None:
            ranges = self._buckets.element_ranges(message.ids)
            buffers: Sequence[wire.Buffer] = [bucket.readable(start, stop) for bucket, start, stop in ranges]
        else:
            lengths, segment_counts, buffers = self._payloads(
                self._buckets.segment_ranges(message.ids), back, feedback=self._updates.updater is None
            )
        for (bucket, _, _), buffer in zip(ranges, buffers, strict=False):
            bucket.lend(buffer)
        return wire.Values(
            message.seq,
            self._buckets.versions(message.ids) if self._rule.quorum is not None else [],
            ahead,
            late,
            lengths,
            segment_counts,
            message.priority if isinstance(message, wire.Push) else None,
            buffers,
        )

    def remember(self, ids: Sequence[int], ranks: Sequence[int]) -> None:
        """Keep the values of segments ``ids``, which workers ``ranks`` read now, for delay compensation."""
        if self._recording.on:
            self._recording.read(ids, ranks)
        for bucket in self._buckets.of(ids):
            for rank in ranks:
                bucket.remember(rank)

    def follow(self, message: wire.EncodedAnswer) -> None:
        """Encode values as another server has, so that the same residual stays."""
        back = described(message.back)
        if back is None:
            raise ValueError("values were encoded without a compression")
        with suppress(UsageError):  # NaN: the other server has said so in its answer
            self._payloads(self._buckets.segment_ranges(message.ids), back, feedback=True)

    def _payloads(
        self, ranges: Sequence[tuple[Bucket, int, int]], compression: Compression, feedback: bool
    ) -> tuple[list[int], list[int], list[wire.Buffer]]:
        """Return the payloads of segments: their lengths, how many segments each is of, and a message's buffers.

        ``feedback``: whether the values are sums, and are encoded with error feedback.
        """
        if not feedback and compression.type not in CLOSE:
            raise UsageError(
                f"{compression.type} compression is for sums, not for weights: single weights would be far off; "
                f"choose from {', '.join(sorted(CLOSE))}"
            )
        # Sums that are assigned are encoded with error feedback (DoubleSqueeze, arXiv:1905.05957): the residual stays
        # here, and is added to the next sum. Weights are encoded without, for the next weights do not add to these.
        encoder = self.encoder(compression)
        if feedback and self._recording.on and any(encoder.lacking(*part, feedback=True) for part in ranges):
            ids = [number for bucket, first, stop in ranges for number in bucket.ids[first:stop]]
            self._recording.encoded(ids, travelling(compression))
        chosen = [segments for part in ranges for segments in encoder.encoded(*part, feedback)]
        parts = [to_buffer(segments.encoding.payload(segments.start, segments.stop)) for segments in chosen]
        return [part.nbytes for part in parts], [segments.number for segments in chosen], wire.pack_arrays(parts)

    def encoder(self, compression: Compression) -> ReplyEncoder:
        encoder = self.encoders.get(compression)
        if encoder is None:
            encoder = self.encoders[compression] = ReplyEncoder(
                Compressor(compression, lambda number: self._buckets.segment(number).key)
            )
        return encoder


class _EncodedSegments(NamedTuple):
    """``number`` segments: elements ``start`` to ``stop`` of an encoding."""

    encoding: Encoded
    start: int
    stop: int
    number: int = 1


_NEVER = (None, None)


class _KeptPayload(Encoded):
    """A payload that another server has encoded."""

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

    def finish(self) -> None: ...


class ReplyEncoder:
    """Encodes with one compression, and keeps the last encoding of each segment."""

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
