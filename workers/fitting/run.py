"""``TrainingRun``: a training in progress, epoch by epoch."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from kvstore import KVStore, UsageError
from kvstore.job.config import Config
from workers.callbacks.param import BatchEndParam
from workers.common.run_log import log_line
from workers.fitting import position
from workers.fitting.archive import Archive
from workers.fitting.checkpoint import Checkpoint
from workers.fitting.copies import BatchResult, Copies, LossFunction, leaves
from workers.fitting.diloco_trainer import DiLoCoTrainer
from workers.fitting.division import Divided, require_same_order
from workers.fitting.job_checkpoints import JobCheckpoints
from workers.fitting.position import Position
from workers.fitting.run_callbacks import RunCallbacks
from workers.joining import join
from workers.metrics import EvalMetric
from workers.reducer import Reducer
from workers.trainer import Trainer

log = logging.getLogger(__name__)

_REPORT_S = 1.0
_OVER = object()  # in place of a batch, when there are no more


class TrainingRun:
    """A training in progress. ``fit`` drives it, and callbacks may look at its attributes.

    Attributes:
        model, trainer, store, reducer: what is trained, and with what; ``store`` may be None.
        metric, validation_metric: the metrics of training and of evaluation.
        rank, num_workers: this worker's rank, and the number of workers.
        epoch: the current epoch, from 0.
        batches, samples: how many of the current epoch this worker has used.
        history: see ``fit``.
        stopped: whether training ends with this epoch.
        evaluated: whether there has been the evaluation of the last epoch that is over.
    """

    def __init__(
        self,
        copies: Copies,
        trainer: Trainer | DiLoCoTrainer,
        store: KVStore | None,
        reducer: Reducer,
        train: Divided,
        held_out: Divided,
        loss: LossFunction,
        metric: EvalMetric,
        validation_metric: EvalMetric,
        callbacks: RunCallbacks,
    ) -> None:
        self.model, self.trainer, self.store, self.reducer = copies.models[0], trainer, store, reducer
        self.metric, self.validation_metric = metric, validation_metric
        self.rank, self.num_workers = (0, 1) if store is None else (store.rank, store.num_workers)
        self.epoch = self.batches = self.samples = 0
        self.history: list[dict[str, float]] = []
        self.stopped = False
        self.evaluated = True
        self._not_evaluated: list[Checkpoint] = []  # saved in this epoch, before its evaluation
        self._report_at = 0.0
        self._copies, self._loss = copies, loss
        (self._train_data, self._part), (self._eval_data, self._eval_part) = train, held_out
        if store is not None:
            copies.traced = store.traced
        self._position, self._callbacks = Position(self._train_data), callbacks
        self._in_job: JobCheckpoints | None = None
        self._archive = Archive(copies, trainer, self._position, callbacks, self.rank, self.num_workers)

    @property
    def num_batches(self) -> int | None:
        """The number of batches in an epoch of this worker; None if unknown."""
        return position.length(self._train_data)

    @property
    def evaluates(self) -> bool:
        """Whether there is evaluation data."""
        return self._eval_data is not None

    def stop(self) -> None:
        """End training with this epoch, on all workers."""
        self.stopped = True

    def begin(self, epoch: int, resume: Checkpoint | None) -> None:
        """Prepare the first epoch. Every worker calls this.

        Raises:
            Mismatch: the workers begin at different places.
        """
        self.epoch = epoch
        if resume:
            self.batches, self.samples = resume.batch, self._archive.load(resume, self.metric)
            self.evaluated = self._archive.evaluated
        if self.store is not None and isinstance(self.trainer, Trainer):
            self._in_job = JobCheckpoints(self, self.store, self._archive, self._position)
            self._in_job.attach(resume)
        self._archive.begin(self.reducer, self._in_step(), epoch=epoch, batch=self.batches)
        self._callbacks.tell("begin", self)
        if not self.evaluated and not self.batches:
            self._archive.go_on()  # an evaluation may draw random numbers
            self._evaluate(self.epoch - 1, {})
            self._agree_to_stop()

    def end(self) -> None:
        """Tell the callbacks that training is over."""
        self._callbacks.tell("end")
        self._archive.close()

    def train_epoch(self) -> None:
        """Train one epoch, or the rest of it; call the callbacks; evaluate. Every worker calls this.

        As in MXNet the callbacks of the epoch come first: an evaluation that fails costs no checkpoint.
        """
        tic = time.perf_counter()
        if self.batches == 0:
            self.metric.reset()
        if self._part is not None:
            require_same_order(self._part, self.epoch, self.reducer, self.num_workers)
        self._copies.train()
        for batch in self._left():
            parts = self._step(*position.pair(batch))
            number, self.batches = self.batches, self.batches + 1
            self.samples += sum(part.samples for part in parts)
            self._call("batch", self.epoch, number, self.metric, loss=parts[0].loss)
            self._report(parts[0].loss)
            if self._in_job:
                self._in_job.store.save_checkpoint(if_due=True)
        if self.batches == 0:
            log.warning(
                "worker %d had no batch in epoch %d: is its data empty, or less than a batch with drop_last?",
                *(self.rank, self.epoch),
            )
        self._join(time.perf_counter() - tic)
        self.metric.reduce(self.reducer)
        values = {f"train-{name}": value for name, value in self.metric.get_name_value()}
        for name, value in self.metric.get_name_value():
            log_line(self.rank, "Epoch[%d] Train-%s=%f", self.epoch, name, value)
        log_line(self.rank, "Epoch[%d] Time cost=%.3f", self.epoch, time.perf_counter() - tic)
        self._copies.average_buffers(self.reducer)
        self.history.append(values)
        epoch, self.epoch, self.batches, self.samples = self.epoch, self.epoch + 1, 0, 0
        self.evaluated = self._eval_data is None
        params, buffers = dict(self.model.named_parameters()), dict(self.model.named_buffers())
        for callback in self._callbacks.at("epoch"):
            callback(epoch, self.model, params, buffers)
        self._evaluate(epoch, values)
        for checkpoint in self._not_evaluated:
            self._archive.note_evaluation(checkpoint, self.metric)
        self._not_evaluated.clear()
        if self.store is not None:
            self.store.report(values)
        self._agree_to_stop()

    def save(self, prefix: str, epoch: int, batch: int = 0) -> bool:
        """Write this worker's part of a checkpoint; return whether all parts are there. Every worker calls this.

        Raises:
            UsageError: the checkpoint is within an epoch, and the data cannot continue there.
        """
        checkpoint = Checkpoint(prefix, epoch, batch)
        saved = self._archive.save(checkpoint, self.batches, self.samples, self.metric, self.evaluated)
        if saved and not self.evaluated:
            self._not_evaluated.append(checkpoint)
        return saved

    def remove(self, prefix: str, epoch: int) -> None:
        """Remove this worker's part of a checkpoint."""
        Checkpoint(prefix, epoch).remove(self.rank)

    # ---- helpers

    def _left(self) -> Iterator[Any]:
        """Yield the batches of the epoch, or the rest of them."""
        if self.batches == 0:
            self._archive.go_on()
        if self.batches and self._position.is_over(self.epoch):
            return
        self._position.set_epoch(self.epoch)
        batches = iter(self._train_data)
        if batches is self._train_data and self.history:
            raise UsageError(
                "train_data is an iterator, which ends after one epoch; pass an iterable, such as a DataLoader or a "
                "list"
            )
        self._archive.go_on()  # within an epoch: iter() has drawn random numbers too
        while True:
            began = time.perf_counter()
            batch = next(batches, _OVER)
            if self.store is not None:
                self.store.report(input_s=time.perf_counter() - began)
            if batch is _OVER:
                return
            yield batch

    def _in_step(self) -> KVStore | None:
        """Return the store if all workers make its rounds together: only they can meet within an epoch."""
        store = self.store
        if (
            store is None
            or not isinstance(self.trainer, Trainer)
            or any(word in store.type for word in ("async", "ssp"))
        ):
            return None
        rule = getattr(store, "rule", None)
        return None if getattr(rule, "quorum", None) is not None else store

    def _step(self, inputs: Any, labels: Any) -> list[BatchResult]:
        self.trainer.zero_grad()
        parts = self._copies.backward(inputs, labels, self._loss)
        self.trainer.step()
        _update(self.metric, parts)
        return parts

    def _report(self, loss: torch.Tensor) -> None:
        """Let the store report the loss, but not more often than somebody reads it: the device is waited for."""
        now = time.monotonic()
        if self.store is not None and now >= self._report_at:
            self._report_at = now + _REPORT_S
            self.store.report({"epoch": self.epoch, "loss": float(loss)})

    def _join(self, seconds: float) -> None:
        """Wait until workers with more batches have made their steps, and take the resulting weights.

        Args:
            seconds: how long this worker's epoch has taken. The wait lasts as long at most, or the store's deadline if
                that is longer.
        """
        replicas = isinstance(self.trainer, DiLoCoTrainer)  # whose weights are not the store's before they join
        if self.store is None or (self.num_workers == 1 and not replicas):
            return
        timeout = max(seconds, Config.from_env().timeout_s)
        meeting = [] if self._archive.meeting is None else [self._archive.meeting]
        if self.trainer.update_on_kvstore:
            before = self.trainer.num_update
            join(self.trainer, *self._copies.table_stores(self.store), *meeting, timeout=timeout)
            self._callbacks.tell("missed", self.trainer.num_update - before, moment="batch")
            return
        if isinstance(self.trainer, Trainer) and self.trainer.joining is not None:
            for sums in meeting:
                sums.begin_join()
            self.trainer.joining.join(timeout)
            join(*meeting, timeout=timeout)
        told = self.reducer.sum({"batches": self.batches, "squares": self.batches**2})
        if (
            told["squares"] * self.num_workers != told["batches"] ** 2
        ):  # equal only if all workers have had the same number
            raise UsageError(
                f"worker {self.rank} has had {self.batches} batches of epoch {self.epoch}, and others another number: "
                "with update_on_kvstore=False its weights are no longer theirs; give all as many, by even_size=True of "
                "SplitSampler, or update on the store"
            )

    def _agree_to_stop(self) -> None:
        self.stopped = self.reducer.sum({"stopped": float(self.stopped)})["stopped"] > 0

    def _evaluate(self, epoch: int, values: dict[str, float]) -> None:
        """Evaluate after ``epoch``, if there is data for it; add the metrics to ``values``."""
        if self._eval_data is None:
            return
        metric, number = self.validation_metric, 0
        metric.reset()
        self._copies.train(False)
        if self._eval_part is not None:
            require_same_order(self._eval_part, epoch, self.reducer, self.num_workers)
            self._eval_part.set_epoch(epoch)
        for number, batch in enumerate(self._eval_data, 1):
            part = self._copies.forward(*position.pair(batch), self._loss)
            _update(metric, [part])
            self._call("eval batch", epoch, number - 1, metric, loss=part.loss)
        metric.reduce(self.reducer)
        self.evaluated = True
        self._call("eval", epoch, number, metric)
        for name, value in metric.get_name_value():
            values[f"validation-{name}"] = value
            log_line(self.rank, "Epoch[%d] Validation-%s=%f", epoch, name, value)
        self._callbacks.tell("evaluated", self._param("eval", epoch, number, metric))

    def _call(self, moment: str, epoch: int, number: int, metric: EvalMetric, **more: Any) -> None:
        callbacks = self._callbacks.at(moment)
        if callbacks:
            param = self._param(moment, epoch, number, metric, **more)
            for callback in callbacks:
                callback(param)

    def _param(self, moment: str, epoch: int, number: int, metric: EvalMetric, **more: Any) -> BatchEndParam:
        local_values = {"self": self, "model": self.model, "trainer": self.trainer, "moment": moment, **more}
        return BatchEndParam(epoch, number, metric, local_values)


def _update(metric: EvalMetric, parts: Sequence[BatchResult]) -> None:
    labels = [label for part in parts for label in leaves(part.labels)]
    outputs = [output for part in parts for output in leaves(part.outputs)]
    losses = [part.loss.expand(part.samples) for part in parts]
    metric.update_dict({"label": labels}, {"output": outputs, "loss": losses})
