"""Pushes that repeat an earlier one: what was found out about that one holds for them. No I/O, no clock.

Most pushes differ from an earlier one by their worker, round and values alone. The rest of them says which bucket they
are for, and with which hyper-parameters. A push that may wait in vain, or belongs to no open round, takes no shortcut:
``ServedStore.push`` then says what is wrong with it.
"""

from __future__ import annotations

from typing import NamedTuple

from kvstore import wire
from kvstore.rule import Rule
from kvstore.spec import FLOATS
from kvstore.wire.frames import SharedFields
from servers.requests.replies import Answer
from servers.store.buckets import Buckets
from servers.store.contributions import payload_of
from servers.store.hyperparameters import UpdateHyperparameters, compressions
from servers.store.store_progress import StoreProgress
from servers.store.target import Bucket, Contribution
from servers.store.waiting import Waiting

MOST = 1024  # pushes that are known; then all are forgotten


class _Known(NamedTuple):
    """The buckets of a push, which is one, and the hyper-parameters to update it with."""

    buckets: tuple[Bucket]
    hyper: UpdateHyperparameters


class Shortcuts:
    """The pushes of one store that have come before.

    Args:
        rule: of the store. There are shortcuts only where a round needs a push of each worker.
        buckets, waiting, progress: of the store.
    """

    def __init__(self, rule: Rule, buckets: Buckets, waiting: Waiting, progress: StoreProgress) -> None:
        self._possible = rule.mode == "sync" and rule.quorum is None
        self._buckets = buckets
        self._waiting = waiting
        self._progress = progress
        self._known: dict[SharedFields | None, _Known] = {}
        self._grouping = buckets.grouping

    def learn(self, message: wire.Push, buckets: list[Bucket]) -> None:
        """Remember a push that has been taken, to ``buckets``."""
        if not self._possible or message.shared is None or message.changes:
            return
        if len(buckets) != 1 or buckets[0].dtype not in FLOATS:  # an optimizer does not take others
            return
        if len(self._known) >= MOST:
            self._known.clear()
        self._look()
        hyper = UpdateHyperparameters(message.lr, message.rescale, (), *compressions(message))
        self._known[message.shared] = _Known((buckets[0],), hyper)

    def take(self, peer: bytes, message: wire.Push) -> list[Answer] | None:
        """Take a push as ``ServedStore.push`` does; return None, and change nothing, if it is not like one before.

        Raises:
            UsageError, WireError: its values are not those of the segments; nothing has changed.
        """
        if self._grouping is not self._buckets.grouping:
            self._look()
        known = self._known.get(message.shared)
        if known is None or self._waiting.uneven or self._buckets.doubts:
            return None
        clocks, ranks = message.clocks, message.workers
        clock = clocks[0]
        if message.rank_clocks or clocks.count(clock) < len(clocks):
            return None
        bucket = known.buckets[0]
        part = Contribution(ranks, clock, payload_of(message, known.buckets), known.hyper)
        if not bucket.rounds.contribute(ranks, clock, part):
            return None
        self._waiting.wait(peer, message, bucket, clock)
        return self._progress.contributed(message, known.buckets)

    def _look(self) -> None:
        """Forget all if segments are grouped otherwise now: else buckets would be kept that nobody has any more."""
        if self._grouping is not self._buckets.grouping:
            self._known.clear()
            self._grouping = self._buckets.grouping
