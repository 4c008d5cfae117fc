"""A budget of time for strangers. Pure: the clock is passed in."""

from __future__ import annotations


class Budget:
    """A token bucket of seconds. An expense may exceed it; then nothing is left until the debt is paid off.

    Args:
        share: the part of all time that may be spent in the long run.
        burst_s: the size of the bucket: how much may be spent at once after a while without expenses.
        least_s: once all is spent, how much must be there before anything may be spent again.
    """

    def __init__(self, share: float, burst_s: float, least_s: float) -> None:
        self._share = share
        self._burst_s = burst_s
        self._least_s = least_s
        self._saved_s = burst_s
        self._at = float("-inf")  # when that was so

    def spend(self, seconds: float, now: float) -> bool:
        """Note an expense; return whether anything is left."""
        if self._saved_s < self._burst_s:
            self._saved_s = min(self._burst_s, self._saved_s + self._share * (now - self._at))
        self._saved_s -= seconds
        self._at = now
        return self._saved_s > 0.0

    def refund(self, seconds: float) -> None:
        """Give back an expense that was not a stranger's after all."""
        self._saved_s = min(self._burst_s, self._saved_s + seconds)

    def due(self) -> float:
        """When something may be spent again, if all is spent."""
        return self._at + (self._least_s - self._saved_s) / self._share
