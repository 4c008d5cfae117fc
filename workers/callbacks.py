"""Callbacks of ``fit``: what happens after batches and epochs; MXNet's ``callback``, with its names and its lines.

A batch's callbacks are called with a ``BatchEndParam``, an epoch's with the epoch, the model, and its parameters and
buffers by name. A callback that is an object may have more: ``begin(run)`` is called before the first epoch, with what
``fit`` is made of (``workers/fitting.py``), ``end()`` after the last one, whatever ended it; and what ``state_dict()``
returns goes into checkpoints, and to ``load_state_dict(state)`` when training is resumed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch

from workers.metrics import EvalMetric
from workers.progress import ProgressBar
from workers.stopping import EarlyStopping

__all__ = [
    "BatchEndParam",
    "EarlyStopping",
    "LearningRateScheduler",
    "LogValidationMetricsCallback",
    "ProgressBar",
    "Speedometer",
    "do_batch_checkpoint",
    "do_checkpoint",
    "log_train_metric",
]

log = (
    logging.getLogger()
)  # the root logger, as in MXNet: a line begins with INFO:root: where nothing else is configured


class BatchEndParam(NamedTuple):
    """What the callbacks of a batch are told.

    Attributes:
        epoch: counted from 0.
        nbatch: the batch's number in the epoch, from 0; at the end of an evaluation, how many there were.
        eval_metric: the metric, of this worker's own batches; at the end of an evaluation, of all workers.
        locals: by name: ``self``, the run, and its ``trainer`` and ``model``; while training, the batch's ``loss``.
    """

    epoch: int
    nbatch: int
    eval_metric: EvalMetric | None
    locals: Mapping[str, Any]


class Speedometer:
    """Logs a worker's speed, and the metric of its own batches, after every ``frequent`` batches.

    As in MXNet the clock starts with the end of an epoch's first batch, so that what it waits for is not counted.

    Args:
        batch_size: samples in a batch of this worker.
        frequent: how many batches between lines.
        auto_reset: each line's metric is of the batches since the last one; otherwise, of the whole epoch so far.
    """

    def __init__(self, batch_size: int, frequent: int = 50, auto_reset: bool = True) -> None:
        self.batch_size, self.frequent, self.auto_reset = batch_size, frequent, auto_reset
        self._since = self._last = -1
        self._tic = 0.0

    def __call__(self, param: BatchEndParam) -> None:
        """Take note of a batch."""
        begun, self._last = 0 <= self._last < param.nbatch, param.nbatch
        if not begun:
            self._since, self._tic = param.nbatch, time.perf_counter()
        elif param.nbatch % self.frequent == 0:
            pairs = param.eval_metric.get_name_value() if param.eval_metric else []  # waits for the device
            now = time.perf_counter()
            speed = (param.nbatch - self._since) * self.batch_size / max(now - self._tic, 1e-9)
            shown = "".join(f"\t{name}={value:f}" for name, value in pairs)
            log.info("Epoch[%d] Batch [%d]\tSpeed: %.2f samples/sec%s", param.epoch, param.nbatch, speed, shown)
            if param.eval_metric and self.auto_reset:
                param.eval_metric.reset_local()
            self._since, self._tic = param.nbatch, now


def log_train_metric(period: int, auto_reset: bool = False) -> Callable[[BatchEndParam], None]:
    """Return a callback that logs the metric every ``period`` batches, and begins it anew if ``auto_reset``."""

    def callback(param: BatchEndParam) -> None:
        if param.nbatch % period or param.eval_metric is None:
            return
        for name, value in param.eval_metric.get_name_value():
            log.info("Iter[%d] Batch[%d] Train-%s=%f", param.epoch, param.nbatch, name, value)
        if auto_reset:
            param.eval_metric.reset_local()

    return callback


class LogValidationMetricsCallback:
    """Logs the metric at the end of an evaluation; ``fit`` itself does, too."""

    def __call__(self, param: BatchEndParam) -> None:
        """Log it."""
        for name, value in param.eval_metric.get_name_value() if param.eval_metric else []:
            log.info("Epoch[%d] Validation-%s=%f", param.epoch, name, value)


class Rated(Protocol):
    """What a schedule of learning rates needs of a run of ``fit``."""

    epoch: int

    @property
    def trainer(self) -> Any:
        """What trains; see ``Trainer``."""


class LearningRateScheduler:
    """Sets the learning rate of each epoch; an ``epoch_end_callback``, on every worker.

    For a rate by the number of updates there is ``lr_scheduler`` among the optimizer's parameters. That number is each
    worker's own: where shares are uneven, epochs are what all agree on.

    Args:
        schedule: from an epoch, counted from 0, to its learning rate.
    """

    def __init__(self, schedule: Callable[[int], float]) -> None:
        self._schedule = schedule
        self._run: Rated | None = None

    def begin(self, run: Rated) -> None:
        """Set the first epoch's."""
        self._run = run
        run.trainer.set_learning_rate(self._schedule(run.epoch))

    def __call__(self, epoch: int, *_: Any) -> None:
        """Set the next epoch's."""
        if self._run is not None:
            self._run.trainer.set_learning_rate(self._schedule(epoch + 1))


class Saving(Protocol):
    """What checkpoints need of a run of ``fit``."""

    def save(self, prefix: str, epoch: int, batch: int = 0) -> None:
        """Write a checkpoint."""


class do_checkpoint:  # noqa: N801 - MXNet's name
    """Saves a ``Checkpoint`` after every ``period`` epochs; an ``epoch_end_callback``, on every worker.

    After epoch 0 that is ``prefix-0001.safetensors`` and its companions; see ``workers/checkpoint.py``.
    """

    def __init__(self, prefix: str, period: int = 1) -> None:
        self._prefix, self._period = str(prefix), max(1, int(period))
        self._run: Saving | None = None

    def begin(self, run: Saving) -> None:
        """Be told what to save."""
        self._run = run

    def __call__(
        self, epoch: int, model: Any, arg_params: Mapping[str, torch.Tensor], aux_params: Mapping[str, torch.Tensor]
    ) -> None:
        """Save, if it is time."""
        if self._run is not None and (epoch + 1) % self._period == 0:
            self._run.save(self._prefix, epoch + 1)


class do_batch_checkpoint:  # noqa: N801 - beside MXNet's do_checkpoint
    """Saves a ``Checkpoint`` after every ``period`` batches of an epoch; a ``batch_end_callback``, on every worker.

    After batch 99 of epoch 2 that is ``prefix-0002-000100.safetensors`` and its companions. Old ones stay.
    The training data needs a sampler that can go on within an epoch, such as ``SplitSampler``.
    """

    def __init__(self, prefix: str, period: int) -> None:
        self._prefix, self._period = str(prefix), max(1, int(period))
        self._run: Saving | None = None

    def begin(self, run: Saving) -> None:
        """Be told what to save."""
        self._run = run

    def __call__(self, param: BatchEndParam) -> None:
        """Save, if it is time."""
        if self._run is not None and (param.nbatch + 1) % self._period == 0:
            self._run.save(self._prefix, param.epoch, param.nbatch + 1)
