#!/usr/bin/env python3
"""Train a residual network on CIFAR-10, with one process or with many.

    python train_cifar10.py
    launch.py -n 2 -s 2 --launcher local "python train_cifar10.py"

Three things make it distributed: a *store*, through which the processes exchange what they have learned; a *trainer*,
which stands where a torch program has its optimizer; and a *reducer*, for sums and averages over all workers.
"""

from __future__ import annotations

import logging
import sys
from argparse import Namespace

import torch
from cifar import choice, options, resnet
from cifar.batches import TrainBatches, validation_batches
from cifar.checkpoint import Checkpoint, CheckpointError
from cifar.images import DataError
from cifar.progress import Progress
from cifar.replicas import DeviceError, Replicas, find_devices
from cifar.speedometer import Speedometer

import kvstore as kv
from workers import Reducer, Trainer


def main() -> None:
    """Train as the command line says; what the user can mend ends the program with one line."""
    args = options.parse()
    progress = Progress()
    logging.info("start with arguments %s", args)
    try:
        devices = find_devices(args.gpus)
        with kv.create(args.kv_store) as store, Reducer(args.kv_store) as reducer:
            train(args, devices, store, reducer, progress)
    except (CheckpointError, DataError, DeviceError, kv.KVStoreError) as exc:
        sys.exit(f"train_cifar10.py: error: {exc}")


def train(
    args: Namespace, devices: list[torch.device], store: kv.KVStore, reducer: Reducer, progress: Progress
) -> None:
    """One worker's part: learn from its own share of the pictures, in step with the others."""
    place = {"rank": store.rank, "workers": store.num_workers}
    dataset = choice.load(args.dataset, args.data_dir, reducer, store.rank)
    batches = TrainBatches(choice.first(dataset, args.num_examples), args.batch_size, seed=args.seed, **place)

    torch.manual_seed(args.seed)
    model = resnet.build(args.network, args.num_layers)
    if args.load_epoch:
        Checkpoint(args.model_prefix, args.load_epoch).load_weights(model)
    replicas = Replicas(model, devices)
    trainer = Trainer(replicas.named_parameters(), args.optimizer, options.optimizer_params(args), kvstore=store)
    if args.load_epoch:
        Checkpoint(args.model_prefix, args.load_epoch).load_states(trainer)

    for epoch in range(args.load_epoch or 0, args.num_epochs):
        trainer.set_learning_rate(options.learning_rate(args, epoch))
        speedometer = Speedometer(epoch, args.disp_batches)
        for pictures, labels in progress.track(batches.epoch(epoch), len(batches), f"Epoch {epoch}"):
            right = replicas.backward(pictures, labels)
            trainer.step()  # averages the gradients over all workers and devices, and updates the weights
            speedometer.update(right, len(labels))
        speedometer.finish()

        replicas.average_statistics(reducer)
        if args.model_prefix and store.rank == 0:
            Checkpoint(args.model_prefix, epoch + 1).save(replicas.models[0], trainer, args)

        counts = reducer.sum(replicas.validate(validation_batches(dataset, args.batch_size, **place)))
        logging.info("Epoch[%d] Validation-accuracy=%f", epoch, counts["right"] / counts["count"])


if __name__ == "__main__":
    main()
