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

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from kvstore import KVStore, UnknownName, UsageError
from kvstore.errors import choices
from workers import metrics
from workers.common.checks import at_least
from workers.fitting.called import Callbacks, Called
from workers.fitting.checkpoint import Checkpoint
from workers.fitting.copies import Copies, LossFunction
from workers.fitting.run import Run
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
    check_finite: bool = True,
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
        batch_end_callback: called after each batch, one or several; see ``workers/callbacks/``.
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
        check_finite: end with ``NotFinite``, which names worker, parameter and push, where a gradient is NaN or
            infinite. A store that is passed has its own setting.
        trainer_options: further ones of ``Trainer``, such as ``compression_params`` and ``update_on_kvstore``.

    Returns:
        For each epoch, the metrics' values by name, after ``train-`` and ``validation-``.

    Raises:
        UnknownName: an argument that neither this nor ``Trainer`` has; the message lists those there are.
        UsageError: arguments or data that cannot be; see the parts.
        CheckpointError, Mismatch: ``resume`` is missing, damaged or of another run.
        KVStoreError: what the store raises.
    """
    at_least("num_epoch", num_epoch, 0)
    _require_known(trainer_options)
    if resume is not None and not isinstance(resume, Checkpoint):
        raise UsageError(f"resume={resume!r} is no checkpoint; pass workers.Checkpoint(prefix, epoch)")
    first = (resume.epoch if resume else 0) if begin_epoch is None else begin_epoch
    if resume and first != resume.epoch:
        raise UsageError(f"begin_epoch={first}, but the checkpoint ends {resume.epoch} epochs; leave begin_epoch out")
    called = Called(
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
            reducer = stack.enter_context(Reducer("local" if store is None else store.type))
        if resume:
            resume.load_weights(model)
        elif initializer is not None:
            model.apply(initializer)
        copies = Copies(model, devices)
        trainer = Trainer(
            copies.named_parameters(),
            optimizer,
            optimizer_params,
            store,
            check_finite=check_finite and store is None,
            **trainer_options,
        )
        stack.callback(trainer.close)
        metric = metrics.create(eval_metric)
        second = metric if validation_metric is None else metrics.create(validation_metric)
        run = Run(copies, trainer, store, reducer, train_data, eval_data, loss, metric, second, called)
        stack.callback(run.end)
        run.begin(first, resume)
        while run.epoch < num_epoch and not run.stopped:
            run.train_epoch()
    return run.history


def _require_known(trainer_options: Mapping[str, Any]) -> None:
    """Raise ``UnknownName`` unless ``Trainer`` takes these, beside what ``fit`` gives it."""
    own = {name for name in inspect.signature(fit).parameters if name != "trainer_options"}
    further = set(inspect.signature(Trainer).parameters) - own - {"params"}
    for name in trainer_options:
        if name not in further:
            raise UnknownName(f"fit has no argument {name!r}; choose from {choices(own | further)}")
