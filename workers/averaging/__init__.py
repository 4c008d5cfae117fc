"""Averages of weights, where gradients stay a worker's own: all of them now and then, or a part at each step."""

from workers.averaging.partial import PartialSync
from workers.averaging.periodic import PeriodicAveraging

__all__ = ["PartialSync", "PeriodicAveraging"]
