#!/usr/bin/env python3
"""Train Needle's ResNet9 on CIFAR-10 with DistributedOptimizer, with one process or with many.

    python train_ddp.py
    launch.py -n 2 -s 2 --launcher local "python train_ddp.py"

Four calls make a torch program distributed: ``init``, ``partition_dataset``, ``broadcast_parameters`` and
``DistributedOptimizer``. The training loop does not change.
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace

import torch
from cifar import choice
from cifar.images import DataError
from ddp import options
from ddp.data import Pictures, evaluate
from ddp.models import ResNet9
from torch import nn

import kvstore as kv
import workers
from workers import Reducer


def main() -> None:
    """Train as the command line says. Errors that the user can fix are printed in one line."""
    args = options.parse()
    try:
        train(args)
    except (DataError, kv.KVStoreError) as exc:
        sys.exit(f"train_ddp.py: error: {exc}")


def train(args: Namespace) -> None:
    """Run one worker: train on its share of the images, in step with the others."""
    rank, device = workers.init()
    with Reducer() as reducer:
        data = choice.load(args.dataset, args.data_dir, reducer, rank)
        dataset = Pictures(data.train[: args.num_examples])
        train_set, _ = workers.partition_dataset(
            dataset, args.batch_size, device=device, dtype="float32", seed=args.seed
        )
        if rank == 0:
            print(f"original dataset length: {len(dataset)}")

        torch.manual_seed(args.seed)
        model = ResNet9().to(device)
        workers.broadcast_parameters(model)

        model.train()
        opt = torch.optim.Adam(model.parameters(), lr=args.lr, weight_decay=args.weight_decay)
        opt = workers.DistributedOptimizer(opt)
        loss_fn = nn.CrossEntropyLoss()
        begin = time.time()
        for i in range(args.n_epochs):
            if rank == 0:
                print(f"epoch: {i + 1}/{args.n_epochs}")
            for count, (x, y) in enumerate(train_set):
                opt.zero_grad()
                out = model(x)
                loss = loss_fn(out, y)
                loss.backward()
                opt.step()
                if rank == 0 and count % args.disp_batches == 0:
                    acc = float((out.argmax(1) == y).float().mean())
                    print(f"acc: {acc}; avg_loss: {loss.item()}")
        if rank == 0:
            print(f"Training Time: {time.time() - begin}")

        share = {"batch_size": args.batch_size, "rank": rank, "size": workers.size()}
        acc, avg_loss = evaluate(model, Pictures(data.validation), reducer, **share)
        if rank == 0:
            print(f"evaluation: acc: {acc}; avg_loss: {avg_loss}")


if __name__ == "__main__":
    main()
