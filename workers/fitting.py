"""fit: train a model with metrics, callbacks and checkpoints, as MXNet's ``Module.fit`` does, for torch models.

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

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

import kvstore as kv
from kvstore import KVStore, Mismatch, UsageError
from kvstore.config import Config
from workers import metrics, position, randomness
from workers.callbacks import BatchEndParam, log
from workers.checkpoint import Checkpoint, CheckpointError
from workers.copies import Copies, LossFunction, Part, leaves
from workers.metrics import EvalMetric
from workers.position import Position
from workers.reducer import Reducer
from workers.trainer import Trainer

Callbacks = Callable[..., Any] | Iterable[Callable[..., Any]] | None


def fit(
    model: nn.Module,
    train_data: Iterable[Any],
    eval_data: Iterable[Any] | None = None,
    eval_metric: Any = "acc",
    *,
    num_epoch: int,
    begin_epoch: int | None = None,
    loss: LossFunction = nn.functional.cross_entropy,
    kvstore: KVStore | str | None = "local",
    optimizer: Any = "sgd",
    optimizer_params: Mapping[str, Any] | None = None,
    initializer: Callable[[nn.Module], Any] | None = None,
    batch_end_callback: Callbacks = None,
    epoch_end_callback: Callbacks = None,
    eval_end_callback: Callbacks = None,
    eval_batch_end_callback: Callbacks = None,
    validation_metric: Any = None,
    resume: Checkpoint | None = None,
    devices: Sequence[torch.device | str] | None = None,
    reducer: Reducer | None = None,
    **trainer_options: Any,
) -> list[dict[str, float]]:
    """Train ``model`` on every worker's own share of the data, in step with the others.

    An epoch is: its batches, each with a step of a ``Trainer``; the metric of all workers' batches; averages of the
    model's buffers (batch statistics) over the workers; the evaluation, whose metric is that of all workers' shares;
    and the callbacks of the epoch, which so can save all that is left of it. It logs MXNet's lines::

        Epoch[0] Train-accuracy=0.382812
        Epoch[0] Time cost=114.941
        Epoch[0] Validation-accuracy=0.425977

    Args:
        model: trained in place; all workers start with rank 0's parameters.
        train_data: an iterable of batches, as a ``DataLoader``: pairs of inputs (a tensor, or some in a tuple, list or
            dict, which become arguments of the model) and labels. It is iterated once an epoch; what of it, or of its
            sampler, has ``set_epoch`` is told the epoch first.
        eval_data: the same, to evaluate with after each epoch; None not to.
        eval_metric: what ``metrics.create`` takes: ``acc``, ``ce``, ``loss``, a list of these, ...
        num_epoch: the number of the last epoch, plus 1: epochs that are done already count.
        begin_epoch: the number of the first one; by default 0, or where ``resume`` ends.
        loss: from the model's output and the labels to a scalar, the mean over the batch.
        kvstore, optimizer, optimizer_params: as for ``Trainer``.
        initializer: applied to each module of the model (``model.apply``) before training, unless it is resumed.
        batch_end_callback: called after each batch, one or several; see ``workers/callbacks.py``.
        epoch_end_callback: called after each epoch with its number, the model, and its parameters and buffers by name.
        eval_end_callback: called after each evaluation.
        eval_batch_end_callback: called after each of its batches.
        validation_metric: for the evaluation; by default ``eval_metric``.
        resume: go on from this checkpoint. With a synchronous store, and as many workers, the weights are those of a
            run that was never interrupted, to the bit, if all else is the same. Compression on the way back
            (``pull``) rounds the weights, so that with it the runs differ.
        devices: several devices of this process, each with a copy of the model and a part of every batch; by default,
            the one where the model is.
        reducer: sums over the workers; by default, one is made.
        trainer_options: further ones of ``Trainer``, such as ``compression_params`` and ``update_on_kvstore``.

    Returns:
        For each epoch, the metrics' values by name, after ``train-`` and ``validation-``.

    Raises:
        UsageError: arguments or data that cannot be; see the parts.
        CheckpointError, Mismatch: ``resume`` is missing, damaged or of another run.
        KVStoreError: what the store raises.
    """
    if isinstance(num_epoch, bool) or not isinstance(num_epoch, int) or num_epoch < 0:
        raise UsageError(f"num_epoch={num_epoch!r} must be an integer of at least 0")
    first = (resume.epoch if resume else 0) if begin_epoch is None else begin_epoch
    if resume and first != resume.epoch:
        raise UsageError(f"begin_epoch={first}, but the checkpoint ends {resume.epoch} epochs; leave begin_epoch out")
    called = {
        "batch": _listed(batch_end_callback),
        "epoch": _listed(epoch_end_callback),
        "eval": _listed(eval_end_callback),
        "eval batch": _listed(eval_batch_end_callback),
    }
    with ExitStack() as stack:
        store = stack.enter_context(kv.create(kvstore)) if isinstance(kvstore, str) else kvstore
        if reducer is None:
            reducer = stack.enter_context(Reducer("local" if store is None else store.type))
        if resume:
            resume.load_weights(model)
        elif initializer is not None:
            model.apply(initializer)
        copies = Copies(model, devices)
        trainer = Trainer(copies.named_parameters(), optimizer, optimizer_params, store, **trainer_options)
        stack.callback(trainer.close)
        run = Run(copies, trainer, store, reducer, train_data, eval_data, loss, called)
        run.metric = metrics.create(eval_metric)
        run.validation_metric = run.metric if validation_metric is None else metrics.create(validation_metric)
        stack.callback(run.end)
        run.begin(first, resume)
        while run.epoch < num_epoch and not run.stopped:
            run.train_epoch()
    return run.history


class Run:
    """A training under way: what ``fit`` is made of, and what callbacks may look at.

    Attributes:
        model, trainer, store, reducer: what it trains, and with what; ``store`` may be None.
        metric, validation_metric: of training and of evaluation.
        rank, num_workers: this worker's number, and how many there are.
        epoch: the epoch that is under way, from 0; batches, samples: how many of it this worker has used.
        history: see ``fit``.
        stopped: whether it ends with this epoch.
    """

    metric: EvalMetric
    validation_metric: EvalMetric

    def __init__(
        self,
        copies: Copies,
        trainer: Trainer,
        store: KVStore | None,
        reducer: Reducer,
        train_data: Iterable[Any],
        eval_data: Iterable[Any] | None,
        loss: LossFunction,
        called: Mapping[str, list[Callable[..., Any]]],
    ) -> None:
        self.model, self.trainer, self.store, self.reducer = copies.models[0], trainer, store, reducer
        self.rank, self.num_workers = (0, 1) if store is None else (store.rank, store.num_workers)
        self.epoch = self.batches = self.samples = 0
        self.history: list[dict[str, float]] = []
        self.stopped = False
        self._copies, self._train_data, self._eval_data, self._loss = copies, train_data, eval_data, loss
        self._position = Position(train_data)
        self._called = called
        self._keeps_states = True  # whether a file of this worker's is worth writing
        self._run = 0  # which run this is, so that files of several are not mixed up
        self._resumed: tuple[dict[str, torch.Tensor], dict[str, Any]] | None = None

    @property
    def num_batches(self) -> int | None:
        """How many batches an epoch of this worker has; None if the data does not say."""
        return position.length(self._train_data)

    @property
    def evaluates(self) -> bool:
        """Whether there is evaluation data."""
        return self._eval_data is not None

    def stop(self) -> None:
        """End training with this epoch, on all workers."""
        self.stopped = True

    def begin(self, epoch: int, resume: Checkpoint | None) -> None:
        """Get ready for the first epoch; every worker calls it.

        Raises:
            Mismatch: the workers are not at the same place.
        """
        self.epoch = epoch
        if resume:
            self._resume(resume)
        mine = {"epoch": self.epoch, "batch": resume.batch if resume else 0}
        told = self.reducer.sum({**mine, "run": float(secrets.randbits(40) if self.rank == 0 else 0)})
        self._run = int(told.pop("run"))
        for name, value in mine.items():
            if told[name] != value * self.num_workers:
                raise Mismatch(f"the workers do not begin with the same {name}; worker {self.rank} does with {value}")
        for callback in self._callbacks():
            if callable(begin := getattr(callback, "begin", None)):
                begin(self)

    def end(self) -> None:
        """Tell callbacks that it is over."""
        for callback in self._callbacks():
            if callable(end := getattr(callback, "end", None)):
                end()

    def train_epoch(self) -> None:
        """Train one epoch, or what is left of it, evaluate, and call the callbacks; every worker calls it."""
        tic = time.perf_counter()
        if self.batches == 0:
            self.metric.reset()
        self._copies.train()
        for batch in self._left():
            parts = self._step(*position.pair(batch))
            number, self.batches = self.batches, self.batches + 1
            self.samples += sum(part.samples for part in parts)
            self._call("batch", number, self.metric, loss=parts[0].loss)
        self._join(time.perf_counter() - tic)
        self.metric.reduce(self.reducer)
        values = {f"train-{name}": value for name, value in self.metric.get_name_value()}
        for name, value in self.metric.get_name_value():
            log.info("Epoch[%d] Train-%s=%f", self.epoch, name, value)
        log.info("Epoch[%d] Time cost=%.3f", self.epoch, time.perf_counter() - tic)
        self._copies.average_buffers(self.reducer)
        if self._eval_data is not None:
            for name, value in self._evaluate(self._eval_data):
                values[f"validation-{name}"] = value
                log.info("Epoch[%d] Validation-%s=%f", self.epoch, name, value)
        self.history.append(values)
        epoch, self.epoch, self.batches, self.samples = self.epoch, self.epoch + 1, 0, 0
        params, buffers = dict(self.model.named_parameters()), dict(self.model.named_buffers())
        for callback in self._called["epoch"]:
            callback(epoch, self.model, params, buffers)
        self.stopped = self.reducer.sum({"stopped": float(self.stopped)})["stopped"] > 0

    def save(self, prefix: str, epoch: int, batch: int = 0) -> None:
        """Write this worker's part of a checkpoint of this moment; every worker calls it.

        Raises:
            UsageError: within an epoch of data that cannot go on there.
        """
        checkpoint = Checkpoint(prefix, epoch, batch)
        if batch:
            self._position.require()
        about = {"epoch": epoch, "batch": batch, "run": self._run, "num_workers": self.num_workers}
        if self._keeps_states:
            self._keeps_states = checkpoint.save_states(self.trainer, self.rank)
        random, plain = randomness.state(self._copies.devices)
        own = {
            **about,
            "random": plain,
            "data": self._position.state(self.batches, self.samples),
            "samples": self.samples,
            "metric": self.metric.totals(),
            "callbacks": {name: callback.state_dict() for name, callback in self._stateful().items()},
        }
        tensors = {f"random/{name}": tensor for name, tensor in random.items()}
        tensors |= {f"buffer/{name}": buffer for name, buffer in self._copies.buffers().items()}
        checkpoint.save_worker(self.rank, tensors, own)
        if self.rank == 0:
            checkpoint.save_weights(self.model, about)
            log.info('Saved checkpoint to "%s"', checkpoint.weights)

    # ---- helpers

    def _left(self) -> Iterator[Any]:
        """The batches of the epoch, or its rest."""
        resumed, self._resumed = self._resumed, None
        if resumed and self.batches == 0:
            self._load_random(*resumed)
        if self.batches and self._position.is_over(self.epoch):
            return
        self._position.set_epoch(self.epoch)
        batches = iter(self._train_data)
        if batches is self._train_data and self.history:
            raise UsageError(
                "train_data is an iterator, over after one epoch; pass what makes iterators, as a DataLoader or a list"
            )
        if resumed and self.batches:
            self._load_random(*resumed)  # what began the epoch drew from them, too
        yield from batches

    def _step(self, inputs: Any, labels: Any) -> list[Part]:
        self.trainer.zero_grad()
        parts = self._copies.backward(inputs, labels, self._loss)
        self.trainer.step()
        _update(self.metric, parts)
        return parts

    def _join(self, seconds: float) -> None:
        """Let the others make the steps that this worker has no batches for, and take what came of them.

        Args:
            seconds: how long this worker's epoch has taken; it waits as long again, or until the store's deadline.
        """
        if self.store is None or self.num_workers == 1:
            return
        self.store.join(max(seconds, Config.from_env().timeout_s))
        told = self.reducer.sum({"batches": self.batches, "squares": self.batches**2})
        if told["squares"] * self.num_workers == told["batches"] ** 2:  # only if all have had as many
            return
        if not self.trainer.update_on_kvstore:
            raise UsageError(
                f"worker {self.rank} has had {self.batches} batches of epoch {self.epoch}, and others another number: "
                "with update_on_kvstore=False its weights are no longer theirs; give all as many, by even_size=True of "
                "SplitSampler, or update on the store"
            )
        for name in [name for name, param in self.model.named_parameters() if param.requires_grad]:
            self.store.pull(name, [dict(model.named_parameters())[name].data for model in self._copies.models])

    def _evaluate(self, data: Iterable[Any]) -> list[tuple[str, float]]:
        metric, number = self.validation_metric, 0
        metric.reset()
        self._copies.train(False)
        for number, batch in enumerate(data, 1):
            part = self._copies.forward(*position.pair(batch), self._loss)
            _update(metric, [part])
            self._call("eval batch", number - 1, metric, loss=part.loss)
        metric.reduce(self.reducer)
        self._call("eval", number, metric)
        return metric.get_name_value()

    def _call(self, when: str, number: int, metric: EvalMetric, **more: Any) -> None:
        if not self._called[when]:
            return
        param = BatchEndParam(
            self.epoch, number, metric, {"self": self, "model": self.model, "trainer": self.trainer, **more}
        )
        for callback in self._called[when]:
            callback(param)

    def _callbacks(self) -> list[Any]:
        """All callbacks, each once."""
        return list({id(callback): callback for listed in self._called.values() for callback in listed}.values())

    def _stateful(self) -> dict[str, Any]:
        """The callbacks that checkpoints remember, by name."""
        found: dict[str, Any] = {}
        for callback in self._callbacks():
            if all(callable(getattr(callback, name, None)) for name in ("state_dict", "load_state_dict")):
                name = type(callback).__name__
                found[f"{name}.{sum(each.startswith(f'{name}.') for each in found)}"] = callback
        return found

    def _resume(self, checkpoint: Checkpoint) -> None:
        """Take all but the weights, which the trainer has already."""
        checkpoint.load_states(self.trainer, self.rank)
        about = checkpoint.read_about()
        if not {"num_workers", "run"} <= about.keys():
            raise CheckpointError(f"{checkpoint.weights}: these weights were not saved by fit; load_weights reads them")
        if about["num_workers"] != self.num_workers:
            if checkpoint.batch:
                raise Mismatch(
                    f"{checkpoint.weights}: saved within an epoch by {about['num_workers']} workers, here are "
                    f"{self.num_workers}; only a checkpoint of an epoch's end does for another number"
                )
            log.warning(
                "%s: saved by %d workers, here are %d: what each had of its own is left out",
                *(checkpoint.weights, about["num_workers"], self.num_workers),
            )
            return
        tensors, own = checkpoint.load_worker(self.rank)
        if own["run"] != about["run"]:
            raise Mismatch(f"{checkpoint.worker(self.rank)}: of another run than {checkpoint.weights}")
        buffers = self._copies.buffers()
        with torch.no_grad():
            for name, buffer in buffers.items():
                if (saved := tensors.get(f"buffer/{name}")) is not None:
                    buffer.copy_(saved)
        self._position.load(own["data"])
        self.batches, self.samples = checkpoint.batch, int(own["samples"])
        self.metric.reset()
        if self.batches:
            self.metric.load_totals(own["metric"])
        for name, callback in self._stateful().items():
            if name in own["callbacks"]:
                callback.load_state_dict(own["callbacks"][name])
        self._resumed = tensors, own

    def _load_random(self, tensors: Mapping[str, torch.Tensor], own: Mapping[str, Any]) -> None:
        mine = {name.removeprefix("random/"): value for name, value in tensors.items() if name.startswith("random/")}
        randomness.load(mine, own["random"], self._copies.devices)


def _update(metric: EvalMetric, parts: Sequence[Part]) -> None:
    labels = [label for part in parts for label in leaves(part.labels)]
    outputs = [output for part in parts for output in leaves(part.outputs)]
    losses = [part.loss.expand(part.samples) for part in parts]
    metric.update_dict({"label": labels}, {"output": outputs, "loss": losses})


def _listed(callbacks: Callbacks) -> list[Callable[..., Any]]:
    if callbacks is None:
        return []
    return [callbacks] if callable(callbacks) else list(callbacks)
