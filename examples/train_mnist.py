#!/usr/bin/env python3
"""Train SINGA's convolutional network on MNIST, with one process or with many.

    python train_mnist.py
    launch.py -n 2 -s 2 --launcher local "python train_mnist.py --dist-option half"

It is SINGA's script, with torch tensors. `DistOpt` makes it distributed: it wraps the optimizer, has the ranks, and
sums arrays over workers.
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace

import numpy as np
import torch
from mnist import options
from mnist.cnn import CNN
from mnist.data import Dataset, augmentation, data_partition, evaluation_partition, find_mnist, load_digits, load_mnist
from mnist.idx import DataError
from torch import Tensor
from torch.nn import functional
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LRScheduler

import kvstore as kv
from workers import DistOpt


def main() -> None:
    """Train as the command line says. Errors that the user can fix are printed in one line."""
    args = options.parser("Train a network on MNIST, or on handwritten digits where that is not").parse_args()
    try:
        train_mnist_cnn(args)
    except (DataError, kv.KVStoreError) as exc:
        sys.exit(f"train_mnist.py: error: {exc}")


def train_mnist_cnn(args: Namespace) -> float:
    """Run one worker; return the accuracy on held-out images after the last epoch."""
    torch.manual_seed(args.seed)
    model = CNN()
    sgd = torch.optim.SGD(model.parameters(), lr=args.learning_rate, momentum=0.9, weight_decay=1e-5)
    sgd = DistOpt(sgd)  # all workers now have rank 0's weights
    dev = device(sgd)
    model.to(dev)

    dataset = load_dataset(args, sgd)
    train_x, train_y = data_partition(dataset.train_x, dataset.train_y, sgd.rank_in_global, sgd.world_size)
    test_x, test_y = evaluation_partition(dataset.test_x, dataset.test_y, sgd.rank_in_global, sgd.world_size)

    batch_size = own_batch_size(args, sgd.world_size)
    num_train_batch = train_x.shape[0] // batch_size
    if not num_train_batch:
        raise DataError(f"--batch-size {batch_size} is more than a worker's part, {train_x.shape[0]} pictures")
    idx = np.arange(train_x.shape[0], dtype=np.int32)
    random = np.random.default_rng((args.seed, sgd.rank_in_global))
    accuracy_now = 0.0
    scheduler = lr_scheduler(sgd, args, args.max_epoch * num_train_batch)

    for epoch in range(args.max_epoch):
        start_time = time.time()
        random.shuffle(idx)

        if sgd.rank_in_global == 0:
            print(f"Starting Epoch {epoch}:", flush=True)

        # Training phase
        model.train()
        train_correct = np.zeros(shape=[1], dtype=np.float32)
        test_correct = np.zeros(shape=[1], dtype=np.float32)
        train_loss = np.zeros(shape=[1], dtype=np.float32)
        for b in range(num_train_batch):
            x = train_x[idx[b * batch_size : (b + 1) * batch_size]]
            x = augmentation(x, batch_size, random, mirror=not args.no_mirror)
            y = train_y[idx[b * batch_size : (b + 1) * batch_size]]
            out = model(torch.from_numpy(x).to(dev))
            loss = functional.cross_entropy(out, torch.from_numpy(y).to(dev))
            train_correct += accuracy(out.detach().cpu().numpy(), y)
            train_loss += loss.item()
            update(sgd, loss, args)
            scheduler.step()

        # Sums over all workers
        train_correct = reduce_variable(train_correct, sgd)
        train_loss = reduce_variable(train_loss, sgd)
        if sgd.rank_in_global == 0:
            train_accuracy = train_correct[0] / (num_train_batch * batch_size * sgd.world_size)
            print(f"Training loss = {train_loss[0]:f}, training accuracy = {train_accuracy:f}", flush=True)

        # Evaluation phase
        model.eval()
        with torch.no_grad():
            for b in range(0, test_x.shape[0], args.batch_size):
                out_test = model(torch.from_numpy(test_x[b : b + args.batch_size]).to(dev))
                test_correct += accuracy(out_test.cpu().numpy(), test_y[b : b + args.batch_size])
        accuracy_now = float(reduce_variable(test_correct, sgd)[0]) / len(dataset.test_x)
        if sgd.rank_in_global == 0:
            print(f"Evaluation accuracy = {accuracy_now:f}, Elapsed Time = {time.time() - start_time:f}s", flush=True)
    return accuracy_now


def own_batch_size(args: Namespace, world_size: int) -> int:
    """Return the number of images of a worker in each step."""
    if not args.split_batch:
        return int(args.batch_size)
    if args.batch_size % world_size:
        raise kv.UsageError(
            f"--split-batch cannot share {args.batch_size} pictures out evenly among {world_size} workers; "
            f"choose a multiple of {world_size} as --batch-size"
        )
    return int(args.batch_size) // world_size


def lr_scheduler(sgd: DistOpt, args: Namespace, steps: int) -> LRScheduler:
    """Return the scheduler for a run of `steps` steps: a constant rate, as SINGA's script has, or a cosine to 0."""
    if args.lr_schedule == "cosine":
        return CosineAnnealingLR(sgd.opt, max(1, steps))
    return ConstantLR(sgd.opt, factor=1)


def update(sgd: DistOpt, loss: Tensor, args: Namespace) -> None:
    """Run a backward pass, sum the gradients over workers in the chosen way, and update."""
    if args.dist_option == "plain":
        sgd.backward_and_update(loss, args.threshold)
    elif args.dist_option == "half":
        sgd.backward_and_update_half(loss, args.threshold)
    elif args.dist_option == "partialUpdate":
        sgd.backward_and_partial_update(loss, args.threshold)
    elif args.dist_option == "sparseTopK":
        sgd.backward_and_sparse_update(loss, args.threshold, spars=args.spars, topK=True)
    elif args.dist_option == "sparseThreshold":
        sgd.backward_and_sparse_update(loss, args.threshold, spars=args.spars, topK=False)


def reduce_variable(variable: np.ndarray, dist_opt: DistOpt) -> np.ndarray:
    """Return the sum of `variable` over all workers."""
    dist_opt.all_reduce(variable)
    dist_opt.wait()
    return variable


def accuracy(pred: np.ndarray, target: np.ndarray) -> int:
    """Return the number of correct predictions."""
    return int((pred.argmax(axis=1) == target.argmax(axis=1)).sum())


def load_dataset(args: Namespace, sgd: DistOpt) -> Dataset:
    """Load the data set of `--dataset`, the same on every worker. Rank 0 prints its shapes."""
    paths = None if args.dataset == "digits" else find_mnist(args.data_dir)
    if args.dataset == "mnist" and paths is None:
        raise DataError(f"MNIST's four files are not all in {args.data_dir}; fetch them, or take --dataset digits")
    without = reduce_variable(np.array([float(paths is None)]), sgd)
    dataset = load_digits() if paths is None or without[0] else load_mnist(paths)
    if sgd.rank_in_global == 0:
        if args.dataset == "auto" and without[0]:
            where = "here" if paths is None else "on every worker"
            print(f"MNIST is not in {args.data_dir} {where}; training on handwritten digits", file=sys.stderr)
        for array in (dataset.train_x, dataset.train_y, dataset.test_x, dataset.test_y):
            print(array.shape, flush=True)
    return dataset


def device(sgd: DistOpt) -> torch.device:
    """Return this worker's GPU by its rank on the host, or the CPU if there is no GPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", sgd.rank_in_local % torch.cuda.device_count())


if __name__ == "__main__":
    main()
