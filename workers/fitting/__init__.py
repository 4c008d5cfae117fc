"""fit, after MXNet's ``Module.fit``: training with metrics, callbacks and checkpoints."""

from workers.fitting.checkpoint import Checkpoint, CheckpointError
from workers.fitting.fit import fit

__all__ = ["Checkpoint", "CheckpointError", "fit"]
