#!/usr/bin/env python3
"""Train a residual network on CIFAR-10, with one process or with many.

    python train_cifar10.py
    launch.py -n 2 -s 2 --launcher local "python train_cifar10.py"
    launch.py -n 2 -s 2 --launcher local "python train_cifar10.py --d2l"

Three objects make it distributed: a *store*, through which the processes exchange gradients and weights; a *sampler*,
which gives each process its part of the images; and a *reducer*, for sums over all processes. The rest is `fit`, after
MXNet's.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from cifar import choice, lines, options, resnet
from cifar.batches import seeded
from cifar.devices import DeviceError, find_devices
from cifar.images import DataError
from cifar.loaders import synthetic, train_loader, validation_loader

import kvstore as kv
from workers import Checkpoint, Reducer, callbacks, fit, metrics


def main() -> None:
    """Train as the command line says. Errors that the user can fix are printed in one line."""
    args = options.parse()
    try:
        devices = find_devices(args.gpus)
        with kv.create(args.kv_store) as store, Reducer(args.kv_store) as reducer:
            train(args, devices, store, reducer)
    except (DataError, DeviceError, kv.KVStoreError) as exc:
        sys.exit(f"train_cifar10.py: error: {exc}")


def train(args: Namespace, devices: list[torch.device], store: kv.KVStore, reducer: Reducer) -> None:
    """Run one worker: train on its share of the images, in step with the others."""
    batches, validation = read(args, store, reducer)
    if args.test_io:
        lines.test_io(batches, args.batch_size, args.disp_batches)
        return

    summary = lines.Summary(args, store, len(batches))
    summary.announce()
    torch.manual_seed(args.seed)
    model = resnet.build(args.network, args.num_layers, args.num_classes, getattr(torch, args.dtype))
    torch.set_rng_state(seeded(args.seed, store.rank).get_state())  # each worker draws its own from here on

    eval_metrics = ["accuracy"]
    if args.top_k:
        eval_metrics.append(metrics.create("top_k_accuracy", top_k=args.top_k))
    if args.d2l:
        eval_metrics.append("loss")
    after_batch = [callbacks.Speedometer(args.batch_size, args.disp_batches), callbacks.ProgressBar()]
    if args.monitor:
        after_batch.append(lines.Monitor(args.monitor))
    after_epoch = [summary, callbacks.LearningRateScheduler(lambda epoch: options.learning_rate(args, epoch))]
    after_evaluation: list[Any] = [callbacks.EarlyStopping(patience=args.patience)] if args.patience else []
    if args.log_to:
        log = callbacks.Log(*args.log_to, frequent=args.disp_batches)
        for moment in (after_batch, after_epoch, after_evaluation):
            moment.append(log)
    if args.model_prefix:
        after_epoch.append(callbacks.do_checkpoint(args.model_prefix))
    if args.d2l:
        after_epoch.append(lines.EpochLine())

    fit(
        model,
        batches,
        eval_data=validation,
        eval_metric=eval_metrics,
        kvstore=store,
        optimizer=args.optimizer,
        optimizer_params=options.optimizer_params(args),
        num_epoch=args.num_epochs,
        batch_end_callback=after_batch,
        epoch_end_callback=after_epoch,
        eval_end_callback=after_evaluation,
        resume=Checkpoint(args.model_prefix, args.load_epoch) if args.load_epoch else None,
        devices=devices,
        reducer=reducer,
        compression_params=args.gc_type,
    )
    summary.show()


def read(args: Namespace, store: kv.KVStore, reducer: Reducer) -> tuple[Iterable[Any], Iterable[Any] | None]:
    """Return this worker's batches for training and validation; with --benchmark 1, noise and None."""
    if args.benchmark:
        return synthetic(args, store), None
    dataset = choice.load(args.dataset, args.data_dir, reducer, store.rank)
    dataset = choice.first(dataset, args.num_examples)
    if args.rgb_mean:
        dataset = replace(dataset, mean=tuple(value / 255 for value in args.rgb_mean))
    return train_loader(dataset, args, store), validation_loader(dataset, args, store)


if __name__ == "__main__":
    main()
