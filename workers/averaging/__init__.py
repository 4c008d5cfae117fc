"""Weights that are synchronized every few steps. Gradients stay a worker's own.

periodic        ``PeriodicAveraging``: the mean of all weights, every few steps
partial         ``PartialSync``: the mean of one chunk of the weights after each step
replicas        what both share: agreement, averages, an end
diloco          ``DiLoCo``: an outer optimizer on the servers makes a step of many steps of each worker
global_weights  the outer gradients of a worker, and its copy of the servers' weights
stepper         steps of an optimizer, each followed by what is due
agreement       that all workers have the same settings and model
"""

from workers.averaging.diloco import DiLoCo
from workers.averaging.partial import PartialSync
from workers.averaging.periodic import PeriodicAveraging

__all__ = ["DiLoCo", "PartialSync", "PeriodicAveraging"]
