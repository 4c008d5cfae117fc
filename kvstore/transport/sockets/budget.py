"""A budget of time: what strangers may cost. Pure: the clock is passed in."""

from __future__ import annotations


class Budget:
    """A token bucket of seconds. What is spent may exceed it: then there is nothing until the debt is paid off.

    Args:
        share: of all time, how much may be spent in the long run.
        burst_s: how much may be spent at once after a while without expenses, in seconds.
        least_s: once all is spent, there is nothing until there is so much again, in seconds.
    """

    def __init__(self, share: float, burst_s: float, least_s: float) -> None:
        self._share = share
        self._burst_s = burst_s
        self._least_s = least_s
        self._saved_s = burst_s
        self._at = float("-inf")  # when so much was there

    def spend(self, seconds: float, now: float) -> bool:
        """Note an expense; return whether there is anything left."""
        if self._saved_s < self._burst_s:
            self._saved_s = min(self._burst_s, self._saved_s + self._share * (now - self._at))
        self._saved_s -= seconds
        self._at = now
        return self._saved_s > 0.0

    def refund(self, seconds: float) -> None:
        """Give back an expense that turned out not to be this budget's."""
        self._saved_s = min(self._burst_s, self._saved_s + seconds)

    def due(self) -> float:
        """When there will be something to spend, if all is spent."""
        return self._at + (self._least_s - self._saved_s) / self._share
