"""``Archive``: a run into a checkpoint and back, so that it continues with the same bits."""

from __future__ import annotations

import logging
import secrets
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from kvstore import CheckpointError, KVStore, KVStoreError, Mismatch, Unsupported
from workers.common.run_log import log_line
from workers.common.tensors import PLAIN, overwrite, pack, unpack
from workers.fitting import randomness
from workers.fitting.checkpoint import Checkpoint, reading, require_fields
from workers.fitting.copies import Copies
from workers.fitting.diloco_trainer import DiLoCoTrainer
from workers.fitting.position import Position
from workers.fitting.run_callbacks import RunCallbacks
from workers.metrics import EvalMetric
from workers.reducer import Reducer
from workers.trainer import Trainer

log = logging.getLogger(__name__)

FAILED = "failed"  # the key of workers' meetings

# Fields that ``load`` checks. The position in the data has no type here: it belongs to the sampler.
_ABOUT: dict[str, type] = {"num_workers": int, "run": int}
_OWN: dict[str, type] = {"samples": int, "random": dict, "metric": dict, "callbacks": dict}


class Archive:
    """The parts of a worker's run that go into checkpoints, beside the weights and the optimizer's states."""

    def __init__(
        self,
        copies: Copies,
        trainer: Trainer | DiLoCoTrainer,
        position: Position,
        callbacks: RunCallbacks,
        rank: int,
        num_workers: int,
    ) -> None:
        self._copies, self._trainer, self._position, self._callbacks = copies, trainer, position, callbacks
        self._rank, self._num_workers = rank, num_workers
        self._keeps_states = True  # whether this worker has states worth a file
        self._run = 0  # a random number for this run, to tell files of several runs apart
        self._store: KVStore | None = None
        self.evaluated = True  # whether what was loaded has the evaluation of its last epoch behind it
        self._together = False  # whether all workers save at the same moments
        self._sums: Reducer | None = None
        self.meeting: KVStore | None = None
        # Kept until ``go_on``: callbacks, workers' meetings and ``iter`` draw random numbers, and would move on what
        # was loaded.
        self._random: tuple[dict[str, torch.Tensor], Mapping[str, Any]] | None = None

    def begin(self, reducer: Reducer, store: KVStore | None, in_step: KVStore | None, **place: int) -> None:
        """Agree with the other workers on where the run begins (``place``). Every worker calls this.

        ``store``: of the workers that train; ``in_step``: the same if all workers make its rounds together, for a
        meeting within an epoch; None if they do not.
        """
        self._store = store
        savers = self._callbacks.savers
        mark = zlib.crc32(repr(savers).encode()) + 1 if savers else 0
        rows = list(reducer.gather({**place, "run": secrets.randbits(40), "savers": mark}).values())
        self._run = int(rows[0]["run"])
        # A program may let one worker alone save, which must not wait for the others.
        self._together = mark > 0 and all(row["savers"] == mark for row in rows)
        self._sums = reducer
        if self._together and self._num_workers > 1 and in_step is not None and any("batch" in each for each in savers):
            with suppress(Unsupported):
                self.meeting = in_step.companion()
                self.meeting.init(FAILED, torch.zeros(1, dtype=torch.int64, device="cpu"))
        for name, value in place.items():
            if any(row[name] != value for row in rows):
                raise Mismatch(
                    f"the workers do not begin with the same {name}: worker {self._rank} begins with {value}"
                )

    def close(self) -> None:
        if self.meeting is not None:
            with suppress(KVStoreError):  # the run has failed, and says why
                self.meeting.close()

    def save(
        self, checkpoint: Checkpoint, batches: int, samples: int, metric: EvalMetric, evaluated: bool = True
    ) -> bool:
        """Write this worker's part of a checkpoint; return whether all parts are there. Every worker calls this."""
        if checkpoint.batch:
            self._position.require()
        there = self._there()

        def write() -> None:
            # Old files go first: a save that is cut short must not leave new states beside old weights.
            checkpoint.begin(self._rank)
            if self._keeps_states:
                self._keeps_states = checkpoint.save_states(self._trainer, self._rank)
            self._write_own(checkpoint, batches, samples, metric, evaluated)
            if self._rank == there[0]:
                self._write_shared(checkpoint, there)

        failed = not self._tried(checkpoint, write)
        failed, left = self._failed_anywhere(failed, bool(checkpoint.batch))
        leads = self._rank == left[0]
        if leads and not failed and left != there:  # a worker was lost meanwhile, perhaps the one that wrote for all
            failed = not self._tried(checkpoint, lambda: self._write_shared(checkpoint, left))
        if failed:  # a disk that is full ends no training, and a checkpoint is there whole or not at all
            self.remove(checkpoint)
        elif leads:
            log_line(0, 'Saved checkpoint to "%s"', checkpoint.weights)
        return not failed

    def _there(self) -> list[int]:
        """Return the ranks of the workers that are not lost, as this one knows; the first writes for all."""
        return [0] if self._store is None else self._store.members()

    def _tried(self, checkpoint: Checkpoint, write: Callable[[], None]) -> bool:
        try:
            write()
        except OSError as exc:
            log.error(
                "there is no checkpoint %s, and training goes on: %s: %s",
                *(checkpoint.weights.stem, exc.filename or checkpoint.weights, exc.strerror or exc),
            )
            return False
        return True

    def _failed_anywhere(self, failed: bool, within_epoch: bool) -> tuple[bool, list[int]]:
        """Return whether the part of any worker has failed, as far as workers can tell each other now, and who is left.

        Heartbeats tell of losses a moment later on one worker than on another; a meeting tells all the same.
        """
        if self._together and not within_epoch and self._sums is not None:
            rows = self._sums.gather({FAILED: failed})
            return any(row[FAILED] for row in rows.values()), sorted(rows)
        if self.meeting is not None and within_epoch:
            count = torch.tensor([int(failed)], dtype=torch.int64, device="cpu")
            self.meeting.pushpull(FAILED, count)  # without workers that have had all their batches, and have joined
            return bool(count), self._there()
        return failed, self._there()

    def _write_shared(self, checkpoint: Checkpoint, there: list[int]) -> None:
        """Write what is the same on all workers."""
        trainer, model = self._trainer, self._copies.models[0]
        if self._rank:  # the part of worker 0, which is lost
            checkpoint.begin(0)
            checkpoint.save_states(trainer)
        about = {**self._about(checkpoint), "left": there}
        if isinstance(trainer, DiLoCoTrainer):
            trainer.save_weights(checkpoint, model, about)
        else:
            checkpoint.save_weights(model, about)

    def remove(self, checkpoint: Checkpoint) -> None:
        """Remove this worker's part of a checkpoint, and those of lost workers if it writes for all."""
        checkpoint.remove(self._rank)
        there = self._there()
        if self._rank == there[0]:
            for rank in set(range(self._num_workers)).difference(there):
                checkpoint.remove(rank)

    def note_evaluation(self, checkpoint: Checkpoint, metric: EvalMetric) -> None:
        """Write this worker's own state again, after the evaluation: a run that goes on need not make it again."""
        try:
            self._write_own(checkpoint, 0, 0, metric, True)
        except OSError as exc:
            log.warning(
                "%s: %s: what it was before the evaluation stays, which a resumed run makes again",
                *(checkpoint.worker(self._rank), exc.strerror or exc),
            )

    def _about(self, checkpoint: Checkpoint) -> dict[str, Any]:
        return {
            "epoch": checkpoint.epoch,
            "batch": checkpoint.batch,
            "run": self._run,
            "num_workers": self._num_workers,
        }

    def _write_own(
        self, checkpoint: Checkpoint, batches: int, samples: int, metric: EvalMetric, evaluated: bool
    ) -> None:
        tensors, own = self.own(batches, samples, metric)
        own = {**self._about(checkpoint), **own, "evaluated": evaluated}
        if isinstance(self._trainer, DiLoCoTrainer):
            weights, own["diloco"] = self._trainer.save_own(checkpoint, self._rank)
            tensors |= weights
        checkpoint.save_worker(self._rank, tensors, own)

    def own(self, batches: int, samples: int, metric: EvalMetric) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        random, plain = randomness.state(self._copies.devices)
        own = {
            "random": plain,
            "data": self._position.state(batches, samples),
            "samples": samples,
            "metric": metric.totals(),
            "callbacks": self._callbacks.state_dict(),
        }
        buffers, forms = pack({f"buffer/{name}": buffer for name, buffer in self._copies.buffers().items()}, PLAIN)
        if forms:
            own["forms"] = forms
        return {f"random/{name}": tensor for name, tensor in random.items()} | buffers, own

    def load(self, checkpoint: Checkpoint, metric: EvalMetric) -> int:
        """Load all but the weights, which the trainer already has, and the random numbers, which ``go_on`` loads.

        Returns the number of samples of the interrupted epoch that this worker had used.
        """
        about = checkpoint.read_about()
        if not _ABOUT.keys() <= about.keys():
            raise CheckpointError(
                f"{checkpoint.weights}: these weights were not saved by fit; read them with load_weights"
            )
        require_fields(checkpoint.weights, about, _ABOUT)
        savers = len(about.get("left", range(about["num_workers"])))  # older versions did not go on without lost ones
        if not savers == about["num_workers"] == self._num_workers:
            if checkpoint.batch:
                raise Mismatch(
                    f"{checkpoint.weights}: saved within an epoch by {savers} workers, but there are "
                    f"{self._num_workers}: for another number of workers, resume from the end of an epoch"
                )
            lost = f" that were left of {about['num_workers']}" if savers != about["num_workers"] else ""
            log.warning(
                "%s: saved by %d workers%s, but there are %d: each worker's own state is left out",
                *(checkpoint.weights, savers, lost, self._num_workers),
            )
            checkpoint.load_states(self._trainer)
            return 0
        tensors, own = checkpoint.load_worker(self._rank)
        path = checkpoint.worker(self._rank)
        require_fields(path, own, {"run": int})
        if own["run"] != about["run"]:
            raise Mismatch(f"{path}: from another run than {checkpoint.weights}")
        self.evaluated = own.get("evaluated") is not False  # older versions saved after the evaluation
        self.take(path, tensors, own, metric if checkpoint.batch else None)
        checkpoint.load_states(self._trainer, self._rank)
        if isinstance(self._trainer, DiLoCoTrainer):
            require_fields(path, own, {"diloco": dict})
            self._trainer.load_own(checkpoint, self._rank, tensors, own["diloco"])
        if not checkpoint.batch:
            metric.reset()
        return int(own["samples"])

    def take(
        self, path: Path, tensors: Mapping[str, torch.Tensor], own: Mapping[str, Any], metric: EvalMetric | None
    ) -> None:
        """Continue with what ``own`` returned; the random numbers come with ``go_on``."""
        require_fields(path, own, _OWN)
        random = {
            name.removeprefix("random/"): tensor for name, tensor in tensors.items() if name.startswith("random/")
        }
        with reading(path):
            randomness.require(random, own["random"], self._copies.devices)
        if "forms" in own:
            require_fields(path, own, {"forms": dict})
            with reading(path):
                tensors = unpack(tensors, own["forms"])
        for name, buffer in self._copies.buffers().items():
            if (saved := tensors.get(f"buffer/{name}")) is not None:
                if saved.shape != buffer.shape:
                    raise Mismatch(
                        f"{path}: {name!r} has shape {list(saved.shape)}, but the model's has {list(buffer.shape)}"
                    )
                overwrite(buffer, saved.to(buffer.device))
        with reading(path):
            self._position.load(own["data"])
            if metric is not None:
                metric.reset()
                metric.load_totals(own["metric"])
            self._callbacks.load_state_dict(own["callbacks"])
        self._random = random, own["random"]

    def go_on(self) -> None:
        if self._random is not None:
            randomness.load(*self._random, self._copies.devices)
            self._random = None
