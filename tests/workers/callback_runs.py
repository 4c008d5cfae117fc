"""A run of ``fit`` as callbacks see it, and metrics for it."""

from __future__ import annotations

import torch

from workers import metrics
from workers.callbacks import BatchEndParam


class Run:
    """What callbacks need of one."""

    def __init__(self, num_batches: int | None = None, evaluates: bool = True) -> None:
        self.num_batches, self.evaluates = num_batches, evaluates
        self.stopped = False
        self.saved: list[tuple[str, int, int]] = []
        self.removed: list[tuple[str, int]] = []
        self.full: list[int] = []  # epochs whose checkpoints cannot be written

    def stop(self) -> None:
        self.stopped = True

    def save(self, prefix: str, epoch: int, batch: int = 0) -> bool:
        self.saved.append((prefix, epoch, batch))
        return epoch not in self.full

    def remove(self, prefix: str, epoch: int) -> None:
        self.removed.append((prefix, epoch))


def param(nbatch: int, metric: metrics.EvalMetric | None = None, epoch: int = 0) -> BatchEndParam:
    return BatchEndParam(epoch, nbatch, metric, {})


def right(metric: metrics.EvalMetric, right: int, of: int) -> metrics.EvalMetric:
    metric.update(torch.ones(of), (torch.arange(of) < right).long())
    return metric
