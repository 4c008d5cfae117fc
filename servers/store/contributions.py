"""What a push contributes to which buckets, checked. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore import wire
from kvstore.codecs.description import described
from kvstore.errors import UsageError
from kvstore.optim.optimizer import Optimizer
from kvstore.rule import Rule
from kvstore.values import PayloadRange, cut, ranges_of
from servers.names import workers
from servers.store.compression import contribution
from servers.store.hyperparameters import asked, compressions
from servers.store.target import Bucket, Contribution, PushRequest
from servers.store.updates import Update, is_late


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
    """Return what a push contributes to each of ``buckets``, which together are its segments.

    Raises:
        UsageError: an open round does not take its contribution, which is not late either, and no repeat.
    """
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
        rounds = bucket.rounds
        if not (rounds.expects(ranks, clock) or is_late(bucket, ranks, clock, rule) or rounds.counts(ranks, clock)):
            raise UsageError(
                f"push {clock} of {bucket.segments.keys[0]!r} by {workers(ranks)} belongs to no open round: "
                f"{rounds.version} rounds are over, and no push may come twice"
            )
        updates.append(Update(bucket, [part], hyper))
        place += len(bucket.ids)
        start += bucket.size
    return updates


def contribute(message: wire.Push, bucket: Bucket, part: Contribution) -> None:
    """Take ``part``, which ``message`` contributes to ``bucket``."""
    if not message.rank_clocks:
        bucket.rounds.contribute(part.ranks, part.clock, part)
        return
    for rank, own in zip(part.ranks, message.rank_clocks, strict=True):
        bucket.rounds.contribute((rank,), own, part)


def behind_most(message: PushRequest) -> Sequence[int]:
    """Return those workers whose contribution a push is that have pushed least, of several with clocks of their own."""
    own = message.rank_clocks if isinstance(message, wire.Push) else ()
    if not own:
        return message.workers
    return [rank for rank, clock in zip(message.workers, own, strict=True) if clock == min(own)]


def payload_of(message: wire.Push, buckets: Sequence[Bucket]) -> Sequence[PayloadRange]:
    """Return the elements of a push to ``buckets``, checked.

    Raises:
        UsageError, WireError: they are not those of these buckets.
    """
    if not buckets:
        return []
    compression = described(message.codec)
    if compression is not None:
        return contribution(message, compression, buckets)
    return ranges_of(message.buffers, message.dtype(buckets[0].dtype), sum(bucket.size for bucket in buckets))
