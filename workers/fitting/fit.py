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
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from kvstore import KVStore, UnknownName, UsageError
from kvstore.errors import choices, meant
from workers import metrics
from workers.averaging import DiLoCo
from workers.common.checks import at_least, on_off_auto
from workers.fitting.checkpoint import Checkpoint
from workers.fitting.copies import Copies
from workers.fitting.diloco_trainer import DiLoCoTrainer
from workers.fitting.division import Divided, divide
from workers.fitting.run import TrainingRun
from workers.fitting.run_callbacks import RunCallbacks
from workers.reducer import Reducer
from workers.trainer import Trainer
from workers.trainer.decision import opened


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

    Names and order of the arguments are those of MXNet's ``Module.fit``. An epoch consists of a step of a ``Trainer``
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
        UnknownName: neither ``fit`` nor ``Trainer`` has such an argument. The message lists those there are.
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
        store = opened(kvstore, check_finite)
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
        stack.callback(trainer.close)
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
    """Raise ``UnknownName`` unless ``Trainer`` has these arguments, and ``fit`` does not set them itself."""
    own = {name for name in inspect.signature(fit).parameters if name != "trainer_options"}
    further = set(inspect.signature(Trainer).parameters) - own - {"params"}
    for name in trainer_options:
        if name not in further:
            raise UnknownName(
                f"fit has no argument {name!r}; choose from {choices(own | further)}{meant(name, own | further)}"
            )


def _require_diloco(
    diloco: Mapping[str, Any], trainer_options: Mapping[str, Any], devices: Sequence[torch.device | str] | None
) -> None:
    """Raise ``UsageError`` if something does not go with DiLoCo; ``UnknownName`` if it has no such argument."""
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
