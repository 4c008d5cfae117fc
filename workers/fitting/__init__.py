"""``fit``, after MXNet's ``Module.fit``: training with metrics, callbacks and checkpoints."""

from kvstore import CheckpointError
from workers.fitting.checkpoint import Checkpoint
from workers.fitting.fit import fit

__all__ = ["Checkpoint", "CheckpointError", "fit"]
