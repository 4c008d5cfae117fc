"""When a job's checkpoints are due. Pure: no clock.

Workers meet at rounds that they all know, and at each meeting worker 0 says whether a checkpoint is due, and at which
round the next meeting is. For a time, meetings are at half of the rounds that are left, so there are few of them.
"""

from __future__ import annotations

from kvstore.job.valid_values import Interval

NEVER = 2**62  # as a round


class CheckpointSchedule:
    """Worker 0's side; see the module.

    Args:
        every: how often a checkpoint is due.
        rounds: how many rounds have been made.
        now: seconds.
    """

    def __init__(self, every: Interval, rounds: int, now: float) -> None:
        self._every = every
        self._last = rounds, now  # checkpoint
        self._met = rounds, now

    def first(self) -> int:
        """Return the round of the first meeting."""
        return self.next(*self._met)

    def due(self, rounds: int, now: float) -> bool:
        """Return whether a checkpoint is due after ``rounds``; it counts as made then."""
        if self._every.rounds:
            due = rounds // self._every.rounds > self._last[0] // self._every.rounds
        else:
            due = 0 < self._every.seconds <= now - self._last[1]
        if due:
            self.made(rounds, now)
        return due

    def made(self, rounds: int, now: float) -> None:
        """Note that there is a checkpoint after ``rounds``."""
        self._last = rounds, now

    def next(self, rounds: int, now: float) -> int:
        """Return the round of the next meeting, after one at ``rounds``."""
        if self._every.rounds:
            return rounds - rounds % self._every.rounds + self._every.rounds
        if not self._every.seconds:
            return NEVER
        left = self._last[1] + self._every.seconds - now
        passed, took = rounds - self._met[0], now - self._met[1]
        self._met = rounds, now
        if passed < 1 or took <= 0 or left <= 0:
            return rounds + 1
        return rounds + max(1, int(left / took * passed / 2))
