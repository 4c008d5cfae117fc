"""The contributions of a push to buckets, checked. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvstore import wire
from kvstore.codecs import CheckedPayload, Compression
from kvstore.codecs.described import check_payloads
from kvstore.codecs.options import described
from kvstore.errors import UsageError
from kvstore.optim.optimizer import Optimizer
from kvstore.rule import Rule
from kvstore.spec import FLOATS, sum_dtype
from kvstore.values import PayloadRange, TensorRange, cut, one_thread, ranges_of
from servers.names import workers
from servers.store.hyperparameters import asked, compressions
from servers.store.row_target import RowContribution
from servers.store.target import AnyTarget, Bucket, Contribution, PushRequest
from servers.store.updates import Update


def require_mergeable(message: wire.Push, rule: Rule) -> None:
    """Raise ``UsageError`` unless the pushes of several workers may be one in this store."""
    own = message.rank_clocks
    if rule.mode == "sync" and not own:
        return
    what = f"{message.node} sent the sum of pushes of {workers(message.ranks)}"
    if rule.mode == "sync":
        raise UsageError(f"{what} at clocks of their own, {own}; those of one round have one clock")
    if rule.aggregate != "host":
        raise UsageError(f"{what}; in this store each push is an update, unless it has aggregate='host'")
    if own and any(clock != max(own) for clock in message.clocks):
        raise UsageError(f"{what} at clocks {own}, and clocks={message.clocks}, which must be the highest of them")
    if own and message.want and rule.staleness is not None and min(own) < max(own):
        # The worker behind would wait for what the one ahead needs, which may be its own next push.
        raise UsageError(f"{what} at clocks {own}, and wants one answer; with a staleness, each pulls its own")


def updates_of(message: wire.Push, buckets: Sequence[Bucket], rule: Rule, optimizer: Optimizer | None) -> list[Update]:
    """Return what a push contributes to each of ``buckets``, which together are its segments."""
    ranks = message.workers
    ranges: Sequence[PayloadRange] = payload_of(message, buckets)
    hyper = asked(message, optimizer)
    if rule.mode == "sync" and rule.quorum is None:  # else a late push may be of a round before a change
        pushed, back = compressions(message)
        hyper = hyper._replace(pushed=pushed, back=back)
    updates: list[Update] = []
    place = start = 0
    whole = len(buckets) == 1
    for bucket in buckets:
        clock = message.clocks[place]  # the number of the push among each worker's pushes to the bucket
        part = Contribution(ranks, clock, ranges if whole else cut(ranges, start, start + bucket.size), hyper)
        bucket.require_open(ranks, clock)
        updates.append(Update(bucket, [part], hyper))
        place += len(bucket.ids)
        start += bucket.size
    return updates


def contribute(message: PushRequest, target: AnyTarget, part: Contribution | RowContribution) -> None:
    own = message.rank_clocks if isinstance(message, wire.Push) else ()
    if not own:
        target.rounds.contribute(part.ranks, part.clock, part)
        return
    for rank, clock in zip(part.ranks, own, strict=True):
        target.rounds.contribute((rank,), clock, part)


def payload_of(message: wire.Push, buckets: Sequence[Bucket]) -> Sequence[PayloadRange]:
    """Return the elements of a push to ``buckets``, checked."""
    if not buckets:
        return []
    compression = described(message.codec)
    if compression is not None:
        return _compressed(message, compression, buckets)
    return ranges_of(message.buffers, message.dtype(buckets[0].dtype), sum(bucket.size for bucket in buckets))


@dataclass(frozen=True)
class CompressedSegments:
    """Elements ``start`` to ``stop`` of a contribution, as they were sent: decoded when summed. A ``PayloadRange``."""

    start: int
    stop: int
    payload: CheckedPayload

    @property
    def values(self) -> torch.Tensor:
        out = torch.empty(self.stop - self.start, dtype=torch.float32, device="cpu")
        self.write(out, False)
        return out

    def cut(self, start: int, stop: int) -> PayloadRange:
        """Buckets are divided between segments; another worker's buffers may end within one."""
        if start <= self.start and self.stop <= stop:
            return CompressedSegments(self.start - start, self.stop - start, self.payload)
        return TensorRange(self.start, self.values).cut(start, stop)

    def write(self, out: torch.Tensor, add: bool) -> None:
        with one_thread():  # codecs work in chunks, for which to wake other threads takes longer than the work
            self.payload.write(out, add)


def _compressed(message: wire.Push, compression: Compression, buckets: Sequence[Bucket]) -> Sequence[PayloadRange]:
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
