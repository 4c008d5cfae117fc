"""Archive: a run into checkpoints and out of them, so that it goes on to the bit."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import torch

from kvstore import Mismatch
from workers.callbacks.param import log
from workers.fitting import randomness
from workers.fitting.called import Called
from workers.fitting.checkpoint import Checkpoint, CheckpointError, reading, require_fields
from workers.fitting.copies import Copies
from workers.fitting.position import Position
from workers.metrics import EvalMetric
from workers.reducer import Reducer
from workers.trainer import Trainer

# What is read again of what ``save`` says; the place in the data has no kind, as it is the sampler's own business.
_ABOUT: dict[str, type] = {"num_workers": int, "run": int}
_OWN: dict[str, type] = {"run": int, "samples": int, "random": dict, "metric": dict, "callbacks": dict}


class Archive:
    """What of a worker's run goes into checkpoints, beside the weights and the optimizer's states.

    Args:
        copies, trainer, position, called: what the run consists of.
        rank, num_workers: this worker's number, and how many there are.
    """

    def __init__(
        self, copies: Copies, trainer: Trainer, position: Position, called: Called, rank: int, num_workers: int
    ) -> None:
        self._copies, self._trainer, self._position, self._called = copies, trainer, position, called
        self._rank, self._num_workers = rank, num_workers
        self._keeps_states = True  # whether a file of this worker's is worth writing
        self._run = 0  # which run this is, so that files of several are not mixed up
        self._random: tuple[dict[str, torch.Tensor], Mapping[str, Any]] | None = None

    def begin(self, reducer: Reducer, **place: int) -> None:
        """Agree with the other workers on where they begin; every worker calls it.

        Raises:
            Mismatch: they are not at the same ``place``.
        """
        told = reducer.sum({**place, "run": float(secrets.randbits(40) if self._rank == 0 else 0)})
        self._run = int(told.pop("run"))
        for name, value in place.items():
            if told[name] != value * self._num_workers:
                raise Mismatch(f"the workers do not begin with the same {name}; worker {self._rank} does with {value}")

    def save(self, checkpoint: Checkpoint, batches: int, samples: int, metric: EvalMetric) -> None:
        """Write this worker's part of a checkpoint of this moment; every worker calls it.

        Args:
            checkpoint: where to.
            batches, samples: how many of the epoch that is under way this worker has used.
            metric: of that epoch.

        Raises:
            UsageError: within an epoch of data that cannot go on there.
        """
        if checkpoint.batch:
            self._position.require()
        about = {
            "epoch": checkpoint.epoch,
            "batch": checkpoint.batch,
            "run": self._run,
            "num_workers": self._num_workers,
        }
        checkpoint.begin(self._rank)
        if self._keeps_states:
            self._keeps_states = checkpoint.save_states(self._trainer, self._rank)
        random, plain = randomness.state(self._copies.devices)
        own = {
            **about,
            "random": plain,
            "data": self._position.state(batches, samples),
            "samples": samples,
            "metric": metric.totals(),
            "callbacks": self._called.state_dict(),
        }
        tensors = {f"random/{name}": tensor for name, tensor in random.items()}
        tensors |= {f"buffer/{name}": buffer for name, buffer in self._copies.buffers().items()}
        checkpoint.save_worker(self._rank, tensors, own)
        if self._rank == 0:
            checkpoint.save_weights(self._copies.models[0], about)
            log.info('Saved checkpoint to "%s"', checkpoint.weights)

    def load(self, checkpoint: Checkpoint, metric: EvalMetric) -> int:
        """Take all but the weights, which the trainer has already, and the random numbers, which ``go_on`` takes.

        Args:
            checkpoint: where from.
            metric: of the epoch that was under way; it gets what it had.

        Returns:
            How many samples of that epoch this worker had used.

        Raises:
            CheckpointError, Mismatch: it is missing, damaged or of another run.
        """
        about = checkpoint.read_about()
        if not _ABOUT.keys() <= about.keys():
            raise CheckpointError(f"{checkpoint.weights}: these weights were not saved by fit; load_weights reads them")
        require_fields(checkpoint.weights, about, _ABOUT)
        if about["num_workers"] != self._num_workers:
            if checkpoint.batch:
                raise Mismatch(
                    f"{checkpoint.weights}: saved within an epoch by {about['num_workers']} workers, here are "
                    f"{self._num_workers}; only a checkpoint of an epoch's end does for another number"
                )
            log.warning(
                "%s: saved by %d workers, here are %d: what each had of its own is left out",
                *(checkpoint.weights, about["num_workers"], self._num_workers),
            )
            checkpoint.load_states(self._trainer)
            return 0
        tensors, own = checkpoint.load_worker(self._rank)
        path = checkpoint.worker(self._rank)
        require_fields(path, own, _OWN)
        if own["run"] != about["run"]:
            raise Mismatch(f"{path}: of another run than {checkpoint.weights}")
        random = {name.removeprefix("random/"): its for name, its in tensors.items() if name.startswith("random/")}
        with reading(path):
            randomness.require(random, own["random"], self._copies.devices)
        checkpoint.load_states(self._trainer, self._rank)
        with torch.no_grad():
            for name, buffer in self._copies.buffers().items():
                if (saved := tensors.get(f"buffer/{name}")) is not None:
                    if saved.shape != buffer.shape:
                        raise Mismatch(f"{path}: of {name!r} it has {list(saved.shape)}, not {list(buffer.shape)}")
                    buffer.copy_(saved)
        with reading(path):
            self._position.load(own["data"])
            metric.reset()
            if checkpoint.batch:
                metric.load_totals(own["metric"])
            self._called.load_state_dict(own["callbacks"])
        self._random = random, own["random"]
        return int(own["samples"])

    def go_on(self) -> None:
        """Go on with the random numbers of what was loaded, if something was."""
        if self._random is not None:
            randomness.load(*self._random, self._copies.devices)
            self._random = None
