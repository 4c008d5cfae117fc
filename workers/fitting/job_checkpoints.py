"""What ``fit`` adds to the checkpoints that the job makes while it trains (``launch.py --checkpoint-dir``)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from kvstore import KVStore, UsageError
from workers.fitting.archive import Archive
from workers.fitting.checkpoint import Checkpoint, require_fields
from workers.fitting.position import Position
from workers.metrics import EvalMetric

log = logging.getLogger(__name__)

WHERE = Path("the checkpoint of the job")  # for messages


class Training(Protocol):
    """The run, as far as it is saved here; see ``TrainingRun``."""

    epoch: int
    batches: int
    samples: int
    evaluated: bool
    metric: EvalMetric


class JobCheckpoints:
    """See the module. The epoch is shared by all workers; the position in the data is each worker's own.

    Args:
        run, archive, position: of this worker's training.
        store: that updates.
    """

    def __init__(self, run: Training, store: KVStore, archive: Archive, position: Position) -> None:
        self.store = store
        self._run, self._archive, self._position = run, archive, position

    def attach(self, resume: Checkpoint | None) -> None:
        """Take part in the job's checkpoints, and continue from one if the job does.

        Raises:
            UsageError: ``resume`` names another checkpoint to continue from.
        """
        begun = self.store.attach("fit", _Place(self._run), shared=True)
        if begun and resume is not None:
            raise UsageError(f"resume={resume} was passed, but the job was started with --resume; use one of them")
        own = self.store.attach("fit of a worker", self)
        if begun and not own and self._run.batches:
            log.warning("epoch %d begins again, because another number of workers had begun it", self._run.epoch)
        if begun and not own:
            self._run.batches = 0

    def state_dict(self) -> dict[str, Any]:
        """Return this worker's state, within an epoch if the data can continue there."""
        batches, samples = (self._run.batches, self._run.samples) if self._position.continues else (0, 0)
        tensors, own = self._archive.own(batches, samples, self._run.metric)
        return {"batch": batches, "tensors": tensors, "own": own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the state of ``state_dict``."""
        require_fields(WHERE, state, {"batch": int, "tensors": dict, "own": dict})
        self._run.batches = state["batch"]
        self._archive.take(WHERE, state["tensors"], state["own"], self._run.metric if state["batch"] else None)
        self._run.samples = state["own"]["samples"]


class _Place:
    """The epoch and the batch of a run."""

    def __init__(self, run: Training) -> None:
        self._run = run

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self._run.epoch, "batch": self._run.batches, "evaluated": self._run.evaluated}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        require_fields(WHERE, state, {"epoch": int, "batch": int})
        self._run.epoch, self._run.batches = state["epoch"], state["batch"]
        self._run.evaluated = state.get("evaluated") is not False  # older versions evaluated before they saved
