"""``fit``, after MXNet's ``Module.fit``: training with metrics, callbacks and checkpoints.

fit             the function and its arguments; a run, epoch by epoch; what it adds to checkpoints of the job
archive         a run into a checkpoint and back
checkpoint      the files of a checkpoint
run_callbacks   which callbacks are called when
diloco_trainer  what trains where workers synchronize weights by DiLoCo
copies          the model on one or several devices, each with a part of the batch
division        each worker's part of data that all were given whole
position        where the run is in its data
randomness      the state of the random number generators
"""

from kvstore import CheckpointError
from workers.fitting.checkpoint import Checkpoint
from workers.fitting.fit import fit

__all__ = ["Checkpoint", "CheckpointError", "fit"]
