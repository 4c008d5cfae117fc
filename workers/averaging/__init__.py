"""Weights that are synchronized every few steps. Gradients stay a worker's own."""

from workers.averaging.diloco import DiLoCo
from workers.averaging.replicas import PartialSync, PeriodicAveraging

__all__ = ["DiLoCo", "PartialSync", "PeriodicAveraging"]
