"""What a training script uses: the Trainer; averages of weights now and then; sums over workers.

from workers import Trainer

trainer = Trainer(model.named_parameters(), "sgd", {"learning_rate": 0.1, "momentum": 0.9}, kvstore="dist_sync")
loss.backward()
trainer.step()
"""

from workers import callbacks, metrics, schedules
from workers.averaging import PeriodicAveraging
from workers.broadcast import broadcast_object, broadcast_optimizer_state, broadcast_parameters
from workers.checkpoint import Checkpoint, CheckpointError
from workers.dist_opt import DistOpt
from workers.distributed_optimizer import Average, DistributedOptimizer, Sum
from workers.fitting import fit
from workers.group import init, is_initialized, local_rank, local_size, rank, shutdown, size
from workers.partial import PartialSync
from workers.partition import partition_dataset
from workers.reducer import Reducer
from workers.samplers import SplitBatchSampler, SplitSampler
from workers.trainer import Trainer

__all__ = [
    "Average",
    "Checkpoint",
    "CheckpointError",
    "DistOpt",
    "DistributedOptimizer",
    "PartialSync",
    "PeriodicAveraging",
    "Reducer",
    "SplitBatchSampler",
    "SplitSampler",
    "Sum",
    "Trainer",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "callbacks",
    "fit",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "metrics",
    "partition_dataset",
    "rank",
    "schedules",
    "shutdown",
    "size",
]
