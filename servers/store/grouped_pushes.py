"""Pushes of the tables of a group, all together: what most pushes of several tables are. No I/O, no clock.

A push is taken here if nothing about it is unusual. All others are left to ``ServedStore.push_rows``, which splits the
group, and says what is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore import wire
from kvstore.rule import Rule
from servers.requests.replies import Answer
from servers.store.buckets import Buckets
from servers.store.capture import Captures
from servers.store.hyperparameters import UpdateHyperparameters
from servers.store.recording import Recording
from servers.store.row_requests import usual_push_of_group
from servers.store.row_target import GroupContribution, RowTarget, alike, at_one_point
from servers.store.served_tables import ServedTables
from servers.store.store_progress import StoreProgress
from servers.store.waiting import Waiting

MOST_LISTS = 4  # a table that has been pushed in so many changing lists is in no group


class GroupedPushes:
    """The pushes to groups of one store's tables.

    Args:
        rule: of the store. There are groups only where a round needs a push of each worker, or each push is an update.
        buckets, tables, captures, waiting, progress, recording: of the store.
    """

    def __init__(
        self,
        rule: Rule,
        buckets: Buckets,
        tables: ServedTables,
        captures: Captures,
        waiting: Waiting,
        progress: StoreProgress,
        recording: Recording,
    ) -> None:
        self._possible = rule.quorum is None and not rule.finite
        self._each = rule.mode == "async"
        self._buckets = buckets
        self._groups = buckets.groups
        self._tables = tables
        self._captures = captures
        self._waiting = waiting
        self._progress = progress
        self._recording = recording
        self._lists: dict[int, tuple[int, ...]] = {}  # by segment: what it has been pushed with last
        self._changes: dict[int, int] = {}  # by segment: how often that was another list than before

    def learn(self, targets: Sequence[RowTarget]) -> None:
        """Make a group of ``targets``, which have just been pushed together, if they can be one."""
        if len(targets) < 2 and not self._lists:
            return
        if not self._now() or self._mixed(targets) or len(targets) < 2:
            return
        if at_one_point(targets) and alike(targets):
            self._groups.make(targets)

    def take(self, peer: bytes, message: wire.PushRows) -> list[Answer] | None:
        """Take a push as ``ServedStore.push_rows`` does; return None, and change nothing, if it is not a usual one."""
        group = self._groups.find(message.ids)
        if group is None or message.changes or not self._now():
            return None
        clock, ranks = message.clocks[0], message.workers
        if message.clocks.count(clock) < len(message.clocks):
            return None
        pushed = usual_push_of_group(message, group)
        if pushed is None:
            return None
        hyper = UpdateHyperparameters(message.lr, message.rescale)
        request = message.sender[:2] if pushed.answer else None
        item = GroupContribution(ranks, clock, pushed.batch, hyper, request)
        counted = group.rounds.contribute(ranks, clock, item)
        if self._each:
            error = self._tables.groups.make(group, [item], hyper)
            return self._progress.pushed(peer, message, [group], 0, error)
        if not counted:
            return None
        self._waiting.wait(peer, message, group, clock)
        return self._progress.contributed(message, [group])

    def _now(self) -> bool:
        """Return whether there may be groups now: nobody needs tables one by one, and no request may wait in vain."""
        return self._possible and not (
            self._waiting.uneven or self._recording.on or self._captures or self._buckets.doubts
        )

    def _mixed(self, targets: Sequence[RowTarget]) -> bool:
        """Return whether one of ``targets`` is pushed in lists that change, so that a group would be split again."""
        listed = tuple(target.number for target in targets)
        mixed = False
        for number in listed:
            if self._lists.setdefault(number, listed) != listed:
                self._lists[number] = listed
                self._changes[number] = self._changes.get(number, 0) + 1
            mixed |= self._changes.get(number, 0) >= MOST_LISTS
        return mixed
