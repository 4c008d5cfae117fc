"""Lateness: which worker pushes last, and how long others have waited for a worker alone. Pure; takes the time.

A wave is over when a round is, or, where each push is an update, when the lowest clock rises. The worker whose push
ends it came last. Others wait for that worker alone from the moment at which nothing else is missing and a request
waits, until its push comes. In even runs somebody comes last in each wave, too; but then nobody waits long for one
worker alone.

This is for people to look at. No standby gets it, and it decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from servers.activity import Lateness
from servers.store.target import AnyTarget, ParkedRequest


class ArrivalTimes:
    """When the pushes of one process's stores come; ``now`` is when the message came that is being handled."""

    def __init__(self, workers: int) -> None:
        self.now = 0.0
        self._waves = 0
        self._came_last = [0] * workers
        self._alone_s = [0.0] * workers
        self._counted = [0.0] * workers  # until when each has been awaited alone: waves overlap

    @property
    def lateness(self) -> Lateness:
        return Lateness(self._waves, list(self._came_last), list(self._alone_s))

    def wave(self, ranks: Sequence[int], since: float | None) -> None:
        """Note that the contribution of ``ranks``, which has just come, has ended a wave.

        Nothing else was missing from ``since`` on; None if nobody waited, or others were missing, too.
        """
        now, counted = self.now, self._counted
        self._waves += 1
        for rank in ranks:
            self._came_last[rank] += 1
            if since is not None:
                before = counted[rank]
                self._alone_s[rank] += now - (since if since > before else before)
                counted[rank] = now

    def contributed(self, ranks: Sequence[int], clock: int, targets: Sequence[AnyTarget], quorum: bool) -> None:
        """Note that ``ranks`` have contributed to round ``clock`` of ``targets``, whose rounds are closed if complete.

        With a ``quorum`` rounds can do without some workers: then nobody is awaited alone.
        """
        now = since = self.now
        over = False
        for target in targets:
            rounds = target.rounds
            version = rounds.version
            if version > target.judged:
                # Others have been waiting since the last contribution before the one that closes the round.
                over, target.judged, last_at = True, version, target.last_at
                if last_at is not None and last_at < since:
                    since = last_at
                target.last_at = None if rounds.idle else now  # others are a round ahead
            elif clock == version + 1:
                target.last_at = now
        if over:
            self.wave(ranks, since if since < now and not quorum else None)

    def closed(self, targets: Sequence[AnyTarget]) -> None:
        """Note that rounds of some of ``targets`` may have been closed without a contribution that ended their wave."""
        for target in targets:
            if target.rounds.version > target.judged:
                target.judged, target.last_at = target.rounds.version, None

    def updated(self, ranks: Sequence[int], targets: Sequence[AnyTarget], ready: Sequence[ParkedRequest]) -> None:
        """Note that ``ranks`` have pushed to ``targets``, where each push is an update.

        ``ready`` requests waited for it.
        """
        since, over = self.now, False
        for target in targets:
            rounds = target.rounds
            if rounds.version > target.judged:
                over, target.judged = True, rounds.version
                if target.last_at is not None:
                    since = min(since, target.last_at)
                target.last_at = None
            if not rounds.one_behind:
                target.last_at = None
            elif target.last_at is None:
                target.last_at = self.now
        if over:
            waits = min((parked.since for parked in ready), default=self.now)
            self.wave(ranks, max(since, waits) if max(since, waits) < self.now else None)
