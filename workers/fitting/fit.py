"""``fit``: train a torch model with metrics, callbacks and checkpoints, as MXNet's ``Module.fit`` does.

from workers import callbacks, fit

fit(
    model, train, val,
    kvstore="dist_sync", optimizer="sgd", optimizer_params={"learning_rate": 0.1, "momentum": 0.9},
    num_epoch=10,
    batch_end_callback=callbacks.Speedometer(batch_size, 20),
    epoch_end_callback=callbacks.do_checkpoint("model"),
)
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from kvstore import KVStore, UnknownName, UsageError
from kvstore.errors import choices, meant
from kvstore.job.config import Config
from workers import metrics
from workers.averaging import DiLoCo
from workers.callbacks.param import BatchEndParam
from workers.common.checks import at_least, on_off_auto
from workers.common.hand_over import take_values, values_state
from workers.common.run_log import log_line
from workers.common.stores import NO_RULE, open_store, updates_each_push
from workers.fitting import position
from workers.fitting.archive import Archive
from workers.fitting.checkpoint import Checkpoint, require_fields
from workers.fitting.copies import BatchResult, Copies, LossFunction, leaves
from workers.fitting.diloco_trainer import DiLoCoTrainer
from workers.fitting.division import Divided, divide, require_same_order
from workers.fitting.position import Position
from workers.fitting.run_callbacks import RunCallbacks
from workers.joining import join
from workers.metrics import EvalMetric
from workers.reducer import Reducer
from workers.samplers import ElasticSampler
from workers.trainer import Trainer

log = logging.getLogger(__name__)

_REPORT_S = 1.0
_OVER = object()  # in place of a batch, when there are no more


WHERE = Path("the checkpoint of the job")  # for messages


class JobCheckpoints:
    """What ``fit`` adds to the checkpoints that the job makes while it trains (``launch.py --checkpoint-dir``).

    The epoch is shared by all workers; the position in the data is each worker's own.
    """

    def __init__(self, run: TrainingRun, store: KVStore, archive: Archive, position: Position) -> None:
        self.store = store
        self._run, self._archive, self._position = run, archive, position

    def attach(self, resume: Checkpoint | None) -> None:
        """Take part in the job's checkpoints, and continue from one if the job does."""
        begun = self.store.attach("fit", _Place(self._run), shared=True)
        if begun and resume is not None:
            raise UsageError(f"resume={resume} was passed, but the job was started with --resume; use one of them")
        own = self.store.attach("fit of a worker", self)
        if begun and not own and self._run.batches:
            log.warning("epoch %d begins again, because another number of workers had begun it", self._run.epoch)
        if begun and not own:
            self._run.batches = 0

    def state_dict(self) -> dict[str, Any]:
        """This worker's state, within an epoch if the data can continue there."""
        batches, samples = (self._run.batches, self._run.samples) if self._position.continues else (0, 0)
        tensors, own = self._archive.own(batches, samples, self._run.metric)
        return {"batch": batches, "tensors": tensors, "own": own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        require_fields(WHERE, state, {"batch": int, "tensors": dict, "own": dict})
        self._run.batches = state["batch"]
        self._archive.take(WHERE, state["tensors"], state["own"], self._run.metric if state["batch"] else None)
        self._run.samples = state["own"]["samples"]


class _Place:
    """The epoch and the batch of a run."""

    def __init__(self, run: TrainingRun) -> None:
        self._run = run

    def state_dict(self) -> dict[str, Any]:
        run = self._run
        place: dict[str, Any] = {"epoch": run.epoch, "batch": run.batches, "evaluated": run.evaluated}
        if run.store is not None and run.store.min_workers:  # for workers that come back: all are equally far
            place["data"] = run.position()
        return place

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        require_fields(WHERE, state, {"epoch": int, "batch": int})
        self._run.epoch, self._run.batches = state["epoch"], state["batch"]
        self._run.others_at = state.get("data")
        self._run.evaluated = state.get("evaluated") is not False  # older versions evaluated before they saved


class _Buffers:
    """The buffers of a run, as of each worker: one that comes back goes on with those of another."""

    def __init__(self, copies: Copies) -> None:
        self._copies = copies

    def state_dict(self) -> dict[str, Any]:
        return values_state(self._copies.buffers())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        take_values(self._copies.buffers(), state)


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
        self.others_at: Any = None  # where the others are in their data, at a worker that comes back
        self._came_back = False  # whether this worker has, within this epoch
        sampler = getattr(train.data, "sampler", None)
        self._elastic = sampler if isinstance(sampler, ElasticSampler) else None
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
        return position.length(self._train_data)

    @property
    def evaluates(self) -> bool:
        return self._eval_data is not None

    def stop(self) -> None:
        """End training with this epoch, on all workers."""
        self.stopped = True

    def begin(self, epoch: int, resume: Checkpoint | None) -> None:
        self.epoch = epoch
        if resume:
            self.batches, self.samples = resume.batch, self._archive.load(resume, self.metric)
            self.evaluated = self._archive.evaluated
        if self.store is not None and isinstance(self.trainer, Trainer):
            self._in_job = JobCheckpoints(self, self.store, self._archive, self._position)
            self._in_job.attach(resume)
            self.trainer.marks_steps = False  # a step is over when it has been counted here
        elif self.store is not None and self.store.min_workers and self.store.attach("fit", _Place(self), shared=True):
            self.batches = 0  # the job was resumed, and no worker's position in the data was saved
        if self.store is not None and self.store.min_workers:
            self.store.attach("buffers of fit", _Buffers(self._copies), shared=True, saved=False)
        self._archive.begin(self.reducer, self.store, self._in_step(), epoch=epoch, batch=self.batches)
        self._callbacks.tell("begin", self)
        if not self.evaluated and not self.batches:
            self._archive.go_on()  # an evaluation may draw random numbers
            self._evaluate(self.epoch - 1, {})
            self._agree_to_stop()
        if self.trainer.come_back():
            self._came_back = True
            if self._position.continues:
                self._position.load(self.others_at)
            log_line(self.rank, "Epoch[%d] Batch [%d] worker %d is back", self.epoch, self.batches, self.rank)

    def position(self) -> Any:
        """Return the position in the data; None if it keeps none."""
        return self._position.state(self.batches, self.samples) if self._position.continues else None

    def end(self) -> None:
        self._callbacks.tell("end")
        self._archive.close()

    def train_epoch(self) -> None:
        """Train one epoch, or the rest of it; call the callbacks; evaluate. Every worker calls this.

        As in MXNet the callbacks of the epoch come first: an evaluation that fails costs no checkpoint.
        """
        tic = time.perf_counter()
        if self.batches == 0:
            self.metric.reset()
        if self._part is not None and not self._came_back:
            require_same_order(self._part, self.epoch, self.reducer)
        self._copies.train()
        for batch in self._passes(tic):
            parts = self._step(*position.pair(batch))
            number, self.batches = self.batches, self.batches + 1
            self.samples += sum(part.samples for part in parts)
            self._call("batch", self.epoch, number, self.metric, loss=parts[0].loss)
            self._report(parts[0].loss)
            if self._in_job:
                self._in_job.store.save_checkpoint(if_due=True)
            if self.store is not None:
                self.store.boundary()
        self._came_back = False  # not before: ``_left`` asks
        if self.batches == 0:
            log.warning(
                "worker %d had no batch in epoch %d: is its data empty, or less than a batch with drop_last?",
                *(self.rank, self.epoch),
            )
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
        """Write this worker's part of a checkpoint; return whether all parts are there. Every worker calls this."""
        checkpoint = Checkpoint(prefix, epoch, batch)
        saved = self._archive.save(checkpoint, self.batches, self.samples, self.metric, self.evaluated)
        if saved and not self.evaluated:
            self._not_evaluated.append(checkpoint)
        return saved

    def remove(self, prefix: str, epoch: int) -> None:
        self._archive.remove(Checkpoint(prefix, epoch))

    # ---- helpers

    def _passes(self, tic: float) -> Iterator[Any]:
        """Yield the batches of the epoch, and join; again, if samples of a worker that died are left.

        ``tic``: when the epoch began.
        """
        while True:
            yield from self._left()
            self._join(time.perf_counter() - tic)
            if self._elastic is None or self._elastic.is_over():
                return

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
        skips = self._came_back and not self._position.continues and self._elastic is None
        for _ in range(self.batches if skips else 0):
            next(batches, _OVER)  # the others have trained on theirs
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
        if store is None or not isinstance(self.trainer, Trainer) or updates_each_push(store.type):
            return None
        rule = getattr(store, "rule", None)
        return None if getattr(rule, "quorum", None) is not None else store

    def _step(self, inputs: Any, labels: Any) -> list[BatchResult]:
        self.trainer.zero_grad()
        parts = self._copies.backward(inputs, labels, self._loss)
        if isinstance(self.trainer, DiLoCoTrainer):
            self.trainer.step(sum(part.samples for part in parts))
        else:
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
        """Wait until workers with more batches have made their steps; ``seconds`` is how long this epoch has taken."""
        replicas = isinstance(self.trainer, DiLoCoTrainer)  # whose weights are not the store's before they join
        if self.store is None or (self.num_workers == 1 and not replicas):
            return
        timeout = max(seconds, Config.from_env().timeout_s)
        meeting = [] if self._archive.meeting is None else [self._archive.meeting]
        if self.trainer.update_on_kvstore:
            # A scheduler that steps by batch must make the steps that others made more, or rates would differ from now
            # on.
            before = self.trainer.num_update
            join(self.trainer, *self._copies.table_stores(self.store), *meeting, timeout=timeout)
            self._callbacks.tell("missed", self.trainer.num_update - before, moment="batch")
            return
        if isinstance(self.trainer, Trainer) and self.trainer.joining is not None:
            for sums in meeting:
                sums.begin_join()
            self.trainer.joining.join(timeout)
            join(*meeting, timeout=timeout)
        if len({row["batches"] for row in self.reducer.gather({"batches": self.batches}).values()}) > 1:
            raise UsageError(
                f"worker {self.rank} has had {self.batches} batches of epoch {self.epoch}, and others another number: "
                "with update_on_kvstore=False its weights are no longer theirs; give all as many, by even_size=True of "
                "SplitSampler, or update on the store"
            )

    def _agree_to_stop(self) -> None:
        self.stopped = self.reducer.sum({"stopped": float(self.stopped)})["stopped"] > 0

    def _evaluate(self, epoch: int, values: dict[str, float]) -> None:
        if self._eval_data is None:
            return
        metric, number = self.validation_metric, 0
        metric.reset()
        self._copies.train(False)
        if self._eval_part is not None:
            require_same_order(self._eval_part, epoch, self.reducer)
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


def fit(
    model: nn.Module,
    train_data: Iterable[Any],
    eval_data: Iterable[Any] | None = None,
    eval_metric: Any = "acc",
    *,
    num_epoch: int,
    begin_epoch: int | None = None,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    kvstore: KVStore | str | None = "auto",
    optimizer: Any = "sgd",
    optimizer_params: Mapping[str, Any] | None = None,
    initializer: Callable[[nn.Module], Any] | None = None,
    batch_end_callback: Callable[..., Any] | Iterable[Callable[..., Any]] | None = None,
    epoch_end_callback: Callable[..., Any] | Iterable[Callable[..., Any]] | None = None,
    eval_end_callback: Callable[..., Any] | Iterable[Callable[..., Any]] | None = None,
    eval_batch_end_callback: Callable[..., Any] | Iterable[Callable[..., Any]] | None = None,
    validation_metric: Any = None,
    resume: Checkpoint | None = None,
    devices: Sequence[torch.device | str] | None = None,
    reducer: Reducer | None = None,
    check_finite: bool = True,
    diloco: Mapping[str, Any] | None = None,
    split: bool | str = "auto",
    **trainer_options: Any,
) -> list[dict[str, float]]:
    """Train ``model`` on every worker's own part of the data, in step with the other workers.

    Names and order of the arguments are as in MXNet's ``Module.fit``. An epoch consists of a step of a ``Trainer``
    for each batch, the metric over all workers, an average of the model's buffers (batch statistics) over the workers
    (``Reducer.average_buffers`` says of which), the callbacks of the epoch, and the evaluation, with the metric over
    all workers. A checkpoint that a callback saves does not depend on the evaluation; ``resume`` makes it first if it
    had not been made.

    Rank 0 prints MXNet's lines to standard error. If the program has set up ``logging``, they are records of the root
    logger on every rank instead:

        Epoch[0] Train-accuracy=0.382812
        Epoch[0] Time cost=114.941
        Epoch[0] Validation-accuracy=0.425977

    Args:
        model: the model, trained in place. All workers start with rank 0's parameters and buffers.
        train_data: an iterable of batches, such as a ``DataLoader``. A batch is a pair of inputs (a tensor, or several
            in a tuple, list or dict, which become arguments of the model) and labels. It is iterated once per epoch. If
            it or its sampler has ``set_epoch``, that is called first.
        eval_data: data for an evaluation after each epoch, in the same form; None for no evaluation.
        eval_metric: an argument of ``metrics.create``: ``acc``, ``ce``, ``loss``, a list of these, ...
        num_epoch: the number of the last epoch, plus 1. Epochs of a resumed run count.
        begin_epoch: the number of the first epoch; None for 0, or for where ``resume`` ends.
        loss: a function of the model's output and the labels; its result is a scalar, the mean over the batch. None for
            ``torch.nn.functional.cross_entropy``.
        kvstore: a store, or the type of one to make; see ``Trainer``.
        optimizer: an optimizer by name, class or unused instance; see ``Trainer``.
        optimizer_params: its hyper-parameters by name; see ``Trainer``.
        initializer: a function that is applied to each module of the model (``model.apply``) before training; not on
            resumption.
        batch_end_callback: one callback or several, called after each batch; see ``workers.callbacks``.
        epoch_end_callback: called after each epoch, before its evaluation, with the number of the epoch, the model, and
            its parameters and buffers by name.
        eval_end_callback: called after each evaluation.
        eval_batch_end_callback: called after each batch of an evaluation.
        validation_metric: the metric of the evaluation; None for ``eval_metric``.
        resume: the checkpoint to continue from. With a synchronous store and the same number of workers, the weights
            are those of an uninterrupted run, to the bit, if everything else is the same. Compression on the way back
            (``pull``) rounds the weights, so that runs differ.
        devices: several devices of this process, each with a copy of the model and a part of every batch; None for the
            device of the model.
        reducer: sums over the workers; None to make one.
        check_finite: end with ``NotFinite``, which names worker, parameter and push, if a gradient has NaN or infinite
            elements. A store that is passed has its own setting.
        diloco: arguments of ``DiLoCo`` by name, such as ``{"inner_steps": 50}``: each worker trains alone with
            ``optimizer``, and the weights are synchronized every so many steps, and at the end of each epoch. The store
            must be synchronous. There are no ``devices`` and no ``trainer_options`` then.
        split: ``"auto"`` compares what the workers were given. A ``DataLoader`` that is the same everywhere is divided:
            each sample comes once an epoch, on one worker. A worker's batches keep their size, so n workers make an
            n-th of the steps, with n times as many samples in each. Data that differs, because the program divides it,
            and data of other kinds is left as it is. A line on rank 0 says which it was, and how many samples each
            worker has. The same goes for ``eval_data``, whose metrics are sums over all workers. True divides, or
            raises an error; False leaves all data as it is. With one worker nothing is divided.
        trainer_options: further arguments of ``Trainer``, such as ``compression_params`` and ``update_on_kvstore``.

    Returns:
        For each epoch, the metrics' values by name, prefixed with ``train-`` and ``validation-``.

    Raises:
        UnknownName: neither ``fit`` nor ``Trainer`` has such an argument. The message lists the valid ones.
        UsageError: arguments or data are invalid; with ``split=True`` the data cannot be divided, or differs; or every
            worker was given the same one of several parts.
        CheckpointError: ``resume`` is missing or damaged.
        Mismatch: ``resume`` is of another run.
        KVStoreError: an error of the store.
    """
    at_least("num_epoch", num_epoch, 0)
    dividing = on_off_auto("split", split)
    _require_known(trainer_options)
    if diloco is not None:
        _require_diloco(diloco, trainer_options, devices)
    if resume is not None and not isinstance(resume, Checkpoint):
        raise UsageError(f"resume={resume!r} must be a workers.Checkpoint(prefix, epoch)")
    first = (resume.epoch if resume else 0) if begin_epoch is None else begin_epoch
    if resume and first != resume.epoch:
        raise UsageError(
            f"begin_epoch={first}, but the checkpoint has {resume.epoch} finished epochs; leave begin_epoch out"
        )
    callbacks = RunCallbacks(
        {
            "batch": batch_end_callback,
            "epoch": epoch_end_callback,
            "eval": eval_end_callback,
            "eval batch": eval_batch_end_callback,
        }
    )
    with ExitStack() as stack:
        rule, diloco = _outer_rule(kvstore, diloco)
        store = None if kvstore is None else open_store(kvstore, "Trainer", check_finite=check_finite, rule=rule)
        if store is not None and isinstance(kvstore, str):
            stack.enter_context(store)
        if reducer is None:
            reducer = stack.enter_context(Reducer("local" if store is None else store))
        if resume:
            resume.load_weights(model)
        elif initializer is not None:
            model.apply(initializer)
        copies = Copies(model, devices)
        trainer: Trainer | DiLoCoTrainer
        if diloco is None:
            finite = check_finite and store is None
            parameters = copies.named_parameters()
            trainer = Trainer(parameters, optimizer, optimizer_params, store, check_finite=finite, **trainer_options)
        else:
            trainer = DiLoCoTrainer(model, optimizer, optimizer_params, store, diloco, check_finite)
        # The stack ends them in reverse: the callbacks, the trainer's hooks, the sums, then the store that they use.
        stack.callback(trainer.close)
        # After the trainer, which was given lists, and so gives parameters alone.
        copies.begin(reducer)
        metric = metrics.create(eval_metric)
        second = metric if validation_metric is None else metrics.create(validation_metric)
        measured = loss or cross_entropy
        # Workers that update themselves must make as many steps: see ``TrainingRun._join``.
        place = reducer, *((0, 1) if store is None else (store.rank, store.num_workers))
        train = divide(train_data, "training", dividing, *place, even_size=not trainer.update_on_kvstore)
        held_out = Divided(None, None) if eval_data is None else divide(eval_data, "validation", dividing, *place)
        run = TrainingRun(copies, trainer, store, reducer, train, held_out, measured, metric, second, callbacks)
        stack.callback(run.end)
        run.begin(first, resume)
        while run.epoch < num_epoch and not run.stopped:
            run.train_epoch()
    return run.history


def _require_known(trainer_options: Mapping[str, Any]) -> None:
    own = {name for name in inspect.signature(fit).parameters if name != "trainer_options"}
    further = set(inspect.signature(Trainer).parameters) - own - {"params"}
    for name in trainer_options:
        if name not in further:
            raise UnknownName(
                f"fit has no argument {name!r}; choose from {choices(own | further)}{meant(name, own | further)}"
            )


def _outer_rule(
    kvstore: KVStore | str | None, diloco: Mapping[str, Any] | None
) -> tuple[Mapping[str, Any], Mapping[str, Any] | None]:
    """Return what of ``diloco`` are options of the store, if ``fit`` makes it, and the rest."""
    if diloco is None or diloco.get("quorum") is None or not isinstance(kvstore, str):
        return NO_RULE, diloco
    rule = {"late": "keep", **{name: diloco[name] for name in ("quorum", "grace", "late") if name in diloco}}
    return rule, {name: value for name, value in diloco.items() if name not in rule}


def _require_diloco(
    diloco: Mapping[str, Any], trainer_options: Mapping[str, Any], devices: Sequence[torch.device | str] | None
) -> None:
    if trainer_options:
        raise UsageError(
            f"diloco does not go with {', '.join(trainer_options)}: workers push no gradients; compression_params is "
            "one of diloco's own arguments"
        )
    if devices is not None and len(devices) > 1:
        raise UsageError(
            f"diloco works with one device per process, and devices lists {len(devices)}: start a worker for each"
        )
    known = set(inspect.signature(DiLoCo).parameters) - {"model", "optimizer", "kvstore", "buffers"}
    for name in diloco:
        if name not in known:
            raise UnknownName(f"diloco has no argument {name!r}; choose from {choices(known)}{meant(name, known)}")
