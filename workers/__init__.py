"""What a training script uses.

trainer    ``Trainer``, after Gluon's: sums gradients over workers and devices, and updates
fitting    ``fit``, after MXNet's ``Module.fit``: epochs, metrics, callbacks and checkpoints
callbacks  what ``fit`` calls after batches and epochs
ddp        ``DistributedOptimizer``, after Horovod's: any torch optimizer with averaged gradients
dist_opt   ``DistOpt``, after SINGA's: a backward pass, a way to send gradients, and an update
embedding  ``Embedding``, ``EmbeddingBag``, ``lookahead``: torch's modules, with their rows in a store
averaging  ``DiLoCo``, ``PeriodicAveraging`` and ``PartialSync``: synchronize weights every few steps, not gradients
group      the workers of a job as one process sees them: ``init``, ``rank``, ``size``, ``is_main``
broadcast  one worker's parameters, buffers, optimizer state or object for all
gathering  every worker's tensor or object for all
alike      what replicas that update by themselves must have alike
reducer    ``Reducer``: sums and averages of what is not trained
joining    ``join``: the end of the data for several trainers and stores at once
metrics    how good predictions are, as sums over batches and workers
samplers   which samples are whose, in which order
batches    batches of tensors from files: LibSVM, Criteo's logs, Parquet
schedules  learning rates by the number of updates
torchrl    ``KVStoreWeightSyncScheme``, with which TorchRL's collectors follow a job; import it by name
integrations  what Lightning, accelerate, transformers and DDP need; import its modules by name
common     what several of these share

from workers import Trainer

trainer = Trainer(model.named_parameters(), "sgd", {"learning_rate": 0.1, "momentum": 0.9}, kvstore="dist_sync")
loss.backward()
trainer.step()
"""

import kvstore

if not hasattr(kvstore, "create"):  # a module of the user's has the name
    raise ImportError(f"workers needs the package kvstore, but `import kvstore` gives {kvstore}; rename that file")

from kvstore.dynamo import outside_graphs
from workers import callbacks, metrics, schedules
from workers.averaging import DiLoCo, PartialSync, PeriodicAveraging
from workers.batches import criteo_batches, libsvm_batches, parquet_batches
from workers.broadcast import broadcast_object, broadcast_optimizer_state, broadcast_parameters
from workers.ddp import Average, DistributedOptimizer, Sum, partition_dataset
from workers.dist_opt import DistOpt
from workers.embedding import Embedding, EmbeddingBag, lookahead
from workers.fitting import Checkpoint, CheckpointError
from workers.fitting.fit import fit
from workers.gathering import all_gather, gather_object
from workers.group import RankAndDevice, init, is_initialized, is_main, local_rank, local_size, rank, shutdown, size
from workers.joining import join
from workers.reducer import Reducer
from workers.samplers import ElasticSampler, SplitBatchSampler, SplitSampler
from workers.trainer import Trainer

__all__ = [
    "Average",
    "Checkpoint",
    "CheckpointError",
    "DiLoCo",
    "DistOpt",
    "DistributedOptimizer",
    "ElasticSampler",
    "Embedding",
    "EmbeddingBag",
    "PartialSync",
    "PeriodicAveraging",
    "RankAndDevice",
    "Reducer",
    "SplitBatchSampler",
    "SplitSampler",
    "Sum",
    "Trainer",
    "all_gather",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "callbacks",
    "criteo_batches",
    "fit",
    "gather_object",
    "init",
    "is_initialized",
    "is_main",
    "join",
    "libsvm_batches",
    "local_rank",
    "local_size",
    "lookahead",
    "metrics",
    "parquet_batches",
    "partition_dataset",
    "rank",
    "schedules",
    "shutdown",
    "size",
]

# Here and not at each definition, so that a new public name is not forgotten.
for _names in (globals(), vars(callbacks), vars(metrics), vars(schedules)):
    for _name in _names["__all__"]:
        if callable(_names[_name]):
            outside_graphs(_names[_name])


def __dir__() -> list[str]:
    return list(__all__)
