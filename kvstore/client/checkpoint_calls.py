"""The calls of a store that are about the job's checkpoints alone."""

from __future__ import annotations

from kvstore.client.checkpointing import Checkpointing
from kvstore.client.store_calls import StoreCalls
from kvstore.client.trained import TrainedStore
from kvstore.client.worker_part import Stateful
from kvstore.errors import UsageError
from kvstore.store.checkpoint_interface import CheckpointInterface


class CheckpointCalls(StoreCalls, CheckpointInterface):
    """Has these calls; what they need is a ``DistStore``'s."""

    _checkpoints: Checkpointing | None
    _trained: TrainedStore

    def save_checkpoint(self, *, if_due: bool = False, wait: bool = False) -> int | None:
        """See ``KVStore``."""
        self._check()
        if self._checkpoints is None:
            if if_due:
                return None
            raise UsageError(
                "this job has no directory for checkpoints: set KVSTORE_CHECKPOINT_DIR for all its processes, or start "
                "it with launch.py --checkpoint-dir DIR"
            )
        number = (self._checkpoints.step_over if if_due else self._checkpoints.save)(self._trained)
        if wait and not self._checkpoints.finish():
            return None
        return number

    def attach(self, name: str, thing: Stateful, *, shared: bool = False) -> bool:
        """See ``KVStore``."""
        self._check()
        super().attach(name, thing, shared=shared)
        return self._checkpoints is not None and self._checkpoints.attach(name, thing, shared)
