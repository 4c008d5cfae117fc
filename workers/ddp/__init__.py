"""Data-parallel training with a torch optimizer in every worker, after Needle's ``ddp`` and Horovod.

distributed_optimizer  ``DistributedOptimizer``
averager               averages gradients during backward
partition              ``partition_dataset``: a worker's part of a data set

``init``, ``rank`` and ``size`` are in ``workers/group.py``, and broadcasts in ``workers/broadcast.py``.
"""

from workers.ddp.distributed_optimizer import Average, DistributedOptimizer, Sum
from workers.ddp.partition import partition_dataset

__all__ = [
    "Average",
    "DistributedOptimizer",
    "Sum",
    "partition_dataset",
]
