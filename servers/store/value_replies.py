"""Answers that bring the values of segments: plain ones refer to the buckets' memory, others are compressed. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from kvstore import wire
from kvstore.codecs.description import described
from kvstore.errors import UsageError
from kvstore.rule import Rule
from servers.store.buckets import Buckets
from servers.store.compression import CompressedReplies
from servers.store.recording import Recording
from servers.store.target import Bucket
from servers.store.updates import Updates


class ValueReplies:
    """Makes the answers of one store.

    Args:
        rule: of the store.
        buckets: of the store.
        updates: of the store: weights are compressed without error feedback.
        recording: tells a standby, if there is one.

    Attributes:
        compressed: what is kept for answers that are compressed.
    """

    def __init__(self, rule: Rule, buckets: Buckets, updates: Updates, recording: Recording) -> None:
        self.compressed = CompressedReplies(lambda number: buckets.segment(number).key, recording)
        self._rule = rule
        self._buckets = buckets
        self._updates = updates
        self._recording = recording

    def reply(self, message: wire.Push | wire.Pull, late: int, ahead: int) -> wire.Values | wire.Ack:
        """Return the answer to a request that need not wait.

        Args:
            message: the request.
            late: how many of its segments came after their round was over.
            ahead: how many pushes the asker is ahead of the slowest worker.

        Raises:
            UsageError: the values cannot be compressed, for they are not finite.
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
            lengths, segment_counts, buffers = self.compressed.payloads(
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
        with suppress(UsageError):  # NaN, which the other server has told who asked
            self.compressed.payloads(self._buckets.segment_ranges(message.ids), back, feedback=True)
