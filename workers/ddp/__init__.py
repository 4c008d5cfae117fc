"""Data-parallel training with a torch optimizer in every worker, after Needle's ``ddp`` and Horovod.

optimizer    ``DistributedOptimizer``
averager     averages gradients during backward
summed_rows  sums of sparse gradients
broadcast    one worker's parameters, optimizer state or object for all
partition    ``partition_dataset``: a worker's part of a data set

``init``, ``rank`` and ``size`` are in ``workers/group.py``.
"""

from workers.ddp.broadcast import broadcast_object, broadcast_optimizer_state, broadcast_parameters
from workers.ddp.optimizer import Average, DistributedOptimizer, Sum
from workers.ddp.partition import partition_dataset

__all__ = [
    "Average",
    "DistributedOptimizer",
    "Sum",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "partition_dataset",
]
