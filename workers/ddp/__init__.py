"""Data-parallel training with a torch optimizer in every worker, after Needle's ``ddp`` and Horovod."""

from workers.ddp.distributed_optimizer import Average, DistributedOptimizer, Sum
from workers.ddp.partition import partition_dataset

__all__ = [
    "Average",
    "DistributedOptimizer",
    "Sum",
    "partition_dataset",
]
