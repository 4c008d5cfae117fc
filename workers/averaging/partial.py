"""Partial synchronisation, after SINGA's ``DistOpt.backward_and_partial_update``: a chunk of the weights each step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvstore import KVStore
from workers.averaging.replicas import Replicas
from workers.common.checks import at_least
from workers.common.chunks import ChunkRange

CHUNK_BYTES = 8 << 20  # SINGA's threshold, 2 Mi elements of float32


class PartialSync(Replicas):
    """After each step one chunk of the weights is averaged over workers; chunks take turns.

        sync = PartialSync(model, optimizer, "dist_sync", chunk_bytes=1 << 20)
        loss.backward()
        sync.step()

    A step first updates all parameters with this worker's own gradients. Then the weights of chunk number (step - 1)
    modulo ``num_chunks`` become their mean over workers. That is what SINGA's code does, while its guide says that
    gradients are averaged. Averaged weights forget what set them apart, so replicas are never more than
    ``num_chunks`` - 1 local steps away from each other. If it were gradients, one step of ``num_chunks`` would agree,
    and the differences of all others would add up for ever.

    As in SINGA the last layers are in the first chunk. Other than there a value may be cut, so that no step sends more
    than it is allowed to; buffers are averaged too; and parameters without a gradient have their turn, so that workers
    average the same whichever gradients they have.

    With one chunk, and SGD, with momentum or without, the weights are those of synchronous training, up to rounding.
    The optimizer's states are never averaged.

    Args:
        model: a module, or its ``named_parameters()``, which has no buffers. Frozen parameters count, if the optimizer
            has them; a parameter with several names counts once.
        optimizer: any of ``torch.optim``, an instance with parameters of ``model``. Gradients are those of this
            worker's batch; a loss that is a mean over it needs no other learning rate than with synchronous training.
        kvstore: a synchronous store without optimizer, for this alone, or the name of one.
        chunk_bytes: how much a step sends and receives at most, in bytes, apart from 64 for each worker; at least 8.
            float16 travels as float32.
        buffers: average floating-point buffers, such as batch-norm statistics, in their turn.

    Raises:
        UsageError: a wrong argument; the store updates, or serves another model.
        Mismatch: workers disagree on the chunk size or the model.
    """

    def __init__(
        self,
        model: Any,
        optimizer: torch.optim.Optimizer,
        kvstore: KVStore | str = "dist_sync",
        chunk_bytes: int = CHUNK_BYTES,
        buffers: bool = True,
    ) -> None:
        chunk_bytes = at_least("chunk_bytes", chunk_bytes, 8)
        super().__init__(model, optimizer, kvstore, buffers, chunk_bytes, {"chunk_bytes": chunk_bytes})

    @property
    def num_chunks(self) -> int:
        """After how many steps every value has been averaged once."""
        return len(self._chunks)

    def _due(self, step: int) -> Sequence[ChunkRange]:
        return self._chunks[(step - 1) % len(self._chunks)]
