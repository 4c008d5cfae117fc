"""Trainer, after ``gluon.Trainer``: gradients are summed over all workers and devices, and the sums update."""

from workers.trainer.trainer import Trainer

__all__ = ["Trainer"]
