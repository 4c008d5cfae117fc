"""Averages of weights. Gradients stay a worker's own.

periodic  ``PeriodicAveraging``: all weights, every few steps
partial   ``PartialSync``: one chunk of the weights after each step
replicas  what both share: steps, agreement, averages, an end
"""

from workers.averaging.partial import PartialSync
from workers.averaging.periodic import PeriodicAveraging

__all__ = ["PartialSync", "PeriodicAveraging"]
