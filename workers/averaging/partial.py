"""Partial synchronization: one chunk of the weights per step, after SINGA's ``backward_and_partial_update``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvstore import KVStore
from workers.averaging.replicas import Replicas
from workers.common.checks import at_least
from workers.common.chunks import ChunkRange

CHUNK_BYTES = 8 << 20  # SINGA's threshold: 2 Mi elements of float32


class PartialSync(Replicas):
    """Averages one chunk of the weights over workers after each step. Chunks take turns.

        sync = PartialSync(model, optimizer, "dist_sync", chunk_bytes=1 << 20)
        loss.backward()
        sync.step()

    A step first updates all parameters with this worker's own gradients. Then the weights of chunk number (step - 1)
    modulo ``num_chunks`` become their mean over workers. SINGA's code does the same, while its guide says that
    gradients are averaged. With averaged weights, replicas are never more than ``num_chunks`` - 1 local steps apart.
    With averaged gradients, their differences would add up without bound.

    As in SINGA, the last layers are in the first chunk. Unlike there, a value may be cut, so that no step sends more
    than ``chunk_bytes``; buffers are averaged too; and parameters without a gradient have their turn, so that all
    workers average the same values.

    With one chunk and SGD, with or without momentum, the weights are those of synchronous training, up to rounding. The
    optimizer's states are never averaged.

    Args:
        model: a module, or its ``named_parameters()``, which has no buffers. Every worker gets rank 0's parameters,
            frozen ones too, and buffers. Frozen parameters count if the optimizer has them. A parameter with several
            names counts once.
        optimizer: an instance of ``torch.optim.Optimizer`` with parameters of ``model``. Gradients are those of this
            worker's batch. A loss that is a mean over it needs the learning rate of synchronous training.
        kvstore: a synchronous store without optimizer, for this alone, or the type of one to make. ``auto``:
            ``dist_sync`` in a job, ``device`` outside of one.
        chunk_bytes: how much a step sends and receives at most, in bytes; at least 8. For each worker, 32 bytes are
            added, and 8 for each parameter and buffer, by which workers see what is equal. float16 is sent as float32.
        buffers: also average buffers, such as batch-norm statistics, in their turn; see ``Reducer.average_buffers``.
            Those that have no mean become rank 0's in the turn of the last chunk.

    Raises:
        UsageError: an argument is invalid; or the store updates, or serves another model.
        Mismatch: workers disagree on the chunk size or the model.
    """

    def __init__(
        self,
        model: Any,
        optimizer: torch.optim.Optimizer,
        kvstore: KVStore | str = "auto",
        chunk_bytes: int = CHUNK_BYTES,
        buffers: bool = True,
    ) -> None:
        chunk_bytes = at_least("chunk_bytes", chunk_bytes, 8)
        super().__init__(model, optimizer, kvstore, buffers, chunk_bytes, {"chunk_bytes": chunk_bytes})

    @property
    def num_chunks(self) -> int:
        """The number of steps in which every value is averaged once."""
        return len(self._chunks)

    def _due(self, step: int) -> Sequence[ChunkRange]:
        return self._chunks[(step - 1) % len(self._chunks)]
