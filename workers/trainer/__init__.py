"""``Trainer``, after ``gluon.Trainer``: sums gradients over all workers and devices, and updates with the sums."""

from workers.trainer.trainer import Trainer

__all__ = ["Trainer"]
