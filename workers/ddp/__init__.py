"""Data-parallel training with a torch optimizer in every worker, after Needle's ``ddp`` and Horovod.

The workers as a group (``init``, ``rank``, ``size``) are in ``workers/group.py``, which others use too.
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
