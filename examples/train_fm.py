#!/usr/bin/env python3
"""Train a factorization machine whose weights are rows on the servers, with the options of MXNet's example.

    python train_fm.py
    launch.py -n 2 -s 2 --launcher local "python train_fm.py --batch-size 2000 --factor-size 8"
    launch.py -n 2 -s 2 "python train_fm.py --data train.libsvm --test-data test.libsvm --input-size 1000000"

It uses the store itself: one pushpull pushes the gradients of a batch and brings the rows of the next. torch_fm.py is
the same in one process without a store.
"""

from __future__ import annotations

import logging
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from clicks.auc import Quality
from fm import data, options
from fm.data import Samples
from fm.machine import logits
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from torch_fm import batches, quality_of, test_batches

import kvstore as kv

KEYS = ["w", "v", "bias"]
NOTHING = torch.empty(0, dtype=torch.int64)


class Step(NamedTuple):
    """A batch, which rows it needs, and which the next batch does.

    Attributes:
        batch: the samples.
        ids: the features of the batch, each once.
        places: for each feature of each sample its place in `ids`.
        following: the features of the next batch, each once.
    """

    batch: Samples
    ids: Tensor
    places: Tensor
    following: Tensor


def main() -> None:
    """Train as the command line says. Errors that the user can fix are printed in one line."""
    args = options.parse()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        with kv.create(args.kvstore) as store:
            train(args, store)
    except (data.DataError, kv.KVStoreError) as exc:
        sys.exit(f"train_fm.py: error: {exc}")


def train(args: Namespace, store: kv.KVStore) -> Quality:
    """Run one worker, together with the others; return how good the predictions of other samples are."""
    say = logging.info if store.rank == 0 else logging.debug
    store.set_optimizer(args.optimizer, learning_rate=args.lr, wd=args.wd, rescale_grad=1 / store.num_workers)
    linear = kv.Table(shape=(args.input_size, 1))
    factors = kv.Table(shape=(args.input_size, args.factor_size), init="normal", scale=options.SIGMA, seed=args.seed)
    store.init(KEYS, [linear, factors, torch.zeros(1)])
    bias = torch.zeros(1)
    for epoch in range(args.num_epoch):
        losses: list[float] = []
        own = batches(args, epoch, store.rank, store.num_workers)
        rows: list[Tensor] = []
        for number, (batch, ids, places, following) in enumerate(steps(own), 1):
            w, v = rows or store.row_sparse_pull(KEYS[:2], row_ids=[ids, ids])
            for parameter in (w, v, bias):
                parameter.requires_grad_()
            loss = binary_cross_entropy_with_logits(predicted(batch, places, w, v, bias), batch.labels)
            loss.backward()
            gradients = [kv.RowSparse(ids, w.grad), kv.RowSparse(ids, v.grad), bias.grad]
            *rows, bias = store.pushpull(KEYS, gradients, row_ids=[following, following, None]).wait()
            losses.append(loss.item())
            if number % args.log_interval == 0:
                say("Epoch[%d] Batch [%d] log_loss=%.4f", epoch, number, np.mean(losses))
                losses.clear()
    reached = evaluate(args, store, bias)
    say("%s", reached)
    return reached


def steps(own: Iterable[Samples]) -> Iterator[Step]:
    """Yield the steps of an epoch, each with the features of the next."""
    before: tuple[Samples, Tensor, Tensor] | None = None
    for batch in own:
        ids, places = batch.ids.unique(return_inverse=True)
        if before:
            yield Step(*before, ids)
        before = batch, ids, places
    if before:
        yield Step(*before, NOTHING)


def predicted(batch: Samples, places: Tensor, w: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Return the logits of a batch, given the rows of its features."""
    return logits(batch.values, w[places].squeeze(2), v[places], bias)


@torch.no_grad()
def evaluate(args: Namespace, store: kv.KVStore, bias: Tensor) -> Quality:
    """Return how good the predictions of samples are that were not trained on. Each worker makes them all."""
    tested = list(test_batches(args))
    chances = []
    for batch in tested:
        ids, places = batch.ids.unique(return_inverse=True)
        w, v = store.row_sparse_pull(KEYS[:2], row_ids=[ids, ids])
        chances.append(predicted(batch, places, w, v, bias).double().sigmoid().numpy())
    return quality_of(chances, tested)


if __name__ == "__main__":
    main()
