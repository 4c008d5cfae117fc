"""What a training script uses: Trainer, fit, DistributedOptimizer, DistOpt; averages of weights now and then; sums.

from workers import Trainer

trainer = Trainer(model.named_parameters(), "sgd", {"learning_rate": 0.1, "momentum": 0.9}, kvstore="dist_sync")
loss.backward()
trainer.step()
"""

from workers import callbacks, metrics, schedules
from workers.averaging import PartialSync, PeriodicAveraging
from workers.ddp import (
    Average,
    DistributedOptimizer,
    Sum,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
    partition_dataset,
)
from workers.dist_opt import DistOpt
from workers.fitting import Checkpoint, CheckpointError, fit
from workers.group import init, is_initialized, local_rank, local_size, rank, shutdown, size
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
