"""Weights that are synchronized every few steps. Gradients stay a worker's own.

replicas  the mean of all weights every few steps (``PeriodicAveraging``), or of a chunk each step (``PartialSync``)
diloco    ``DiLoCo``: an outer optimizer on the servers makes a step of many steps of each worker
stepper   steps of an optimizer, each followed by what is due; that all workers have the same settings and model
"""

from workers.averaging.diloco import DiLoCo
from workers.averaging.replicas import PartialSync, PeriodicAveraging

__all__ = ["DiLoCo", "PartialSync", "PeriodicAveraging"]
