#!/usr/bin/env python3
"""Train DLRM on a stream of clicks, with embeddings that grow on the servers.

    python train_dlrm.py
    launch.py -n 2 -s 2 --launcher local "python train_dlrm.py"
    launch.py -n 2 -s 2 "python train_dlrm.py --row-optimizer rowwiseadagrad --codec int8 --unseen 200"

Each of the 26 fields has a table on the servers, whose rows are made when an id is first pushed: ids are any 64 bits,
and new ones come all the time. A worker has the network and the rows of its batch. The network is trained by a Trainer.
torch_dlrm.py is the same in one process without a store.
"""

from __future__ import annotations

import logging
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterable

import numpy as np
import torch
from clicks import options
from clicks.auc import Quality, auc, quality
from clicks.dlrm import DLRM
from clicks.stream import DENSE, Batch, Clicks
from closing import cost, size
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from torch_dlrm import stream

import kvstore as kv
import workers
from workers import Reducer, Trainer


def main() -> None:
    """Train as the command line says. Errors that the user can fix are printed in one line."""
    args = options.parse()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        with kv.create(args.kv_store) as tables, kv.create(args.kv_store) as store, Reducer(args.kv_store) as reducer:
            train(args, stream(args), tables, store, reducer)
    except kv.KVStoreError as exc:
        sys.exit(f"train_dlrm.py: error: {exc}")


def train(args: Namespace, clicks: Clicks, tables: kv.KVStore, store: kv.KVStore, reducer: Reducer) -> Quality:
    """Run one worker, together with the others. Rank 0 logs the progress.

    Args:
        args: the command line.
        clicks: of which each worker trains on its part.
        tables: has the embeddings.
        store: has the network.
        reducer: for the predictions of all workers.

    Returns:
        How good the predictions of later clicks are.
    """
    say = logging.info if tables.rank == 0 else logging.debug
    part = {"part": tables.rank, "parts": tables.num_workers}
    tables.set_optimizer(args.row_optimizer, learning_rate=args.row_lr)
    bags = [table(args, tables, field) for field in range(args.fields)]
    torch.manual_seed(args.seed)
    network = DLRM(DENSE, args.fields, args.dim, args.hidden)
    trainer = Trainer(network.named_parameters(), "adam", {"learning_rate": args.lr}, kvstore=store)

    batches: Iterable[Batch] = clicks.batches(range(args.steps), args.batch_size, **part)
    if not args.no_lookahead:
        batches = workers.lookahead(batches, ids_of_all(bags))
    start = began = time.perf_counter()
    scores, labels = [], []
    for step, batch in enumerate(batches, 1):
        logits = network(batch.dense, embedded(bags, batch))
        trainer.zero_grad()
        binary_cross_entropy_with_logits(logits, batch.labels).backward()
        trainer.step()
        scores.append(logits.detach().numpy())
        labels.append(batch.labels.numpy())
        if step % args.disp_steps == 0:
            rate = args.disp_steps * args.batch_size / (time.perf_counter() - began)
            say(
                "Step[%d] AUC=%.4f Samples/s=%.0f",
                step,
                auc(np.concatenate(scores), np.concatenate(labels)),
                rate,
            )
            began, scores, labels = time.perf_counter(), [], []
    say("%s", cost(time.perf_counter() - start, args.steps, tables.statistics()))

    reached = evaluate(args, clicks, network, bags, reducer, **part)
    counts = [tables.table_statistics(each.key) for each in bags]
    rows, nbytes, evicted = (sum(count[name] for count in counts) for name in ("rows", "bytes", "evicted"))
    say("%d tables: %d rows in %s; %d were evicted", len(bags), rows, size(nbytes), evicted)
    say("%s", reached)
    return reached


def table(args: Namespace, tables: kv.KVStore, field: int) -> workers.EmbeddingBag:
    """Return the embeddings of a field: a table that grows."""
    rules: list[kv.Unseen | kv.Capacity] = []
    if args.unseen:
        rules.append(kv.Unseen(args.unseen))
    if args.capacity:
        rules.append(kv.Capacity(args.capacity))
    return workers.EmbeddingBag(
        None,
        args.dim,
        store=tables,
        key=f"field{field}",
        mode="sum",
        init="normal",
        scale=options.SCALE,
        seed=args.seed,
        admit=kv.MinCount(args.min_count) if args.min_count else None,
        evict=rules,
        codec=args.codec,
    )


def ids_of_all(bags: list[workers.EmbeddingBag]) -> dict[workers.EmbeddingBag, Callable[[Batch], Tensor]]:
    """Return for each field's embeddings the function that gives their ids."""
    return {bag: ids_of(field) for field, bag in enumerate(bags)}


def ids_of(field: int) -> Callable[[Batch], Tensor]:
    """Return the function that gives the ids of one field."""
    return lambda batch: batch.ids[:, field : field + 1]


def embedded(bags: list[workers.EmbeddingBag], batch: Batch) -> list[Tensor]:
    """Return the vectors of each field."""
    return [bag(ids_of(field)(batch)) for field, bag in enumerate(bags)]


@torch.no_grad()
def evaluate(
    args: Namespace,
    clicks: Clicks,
    network: DLRM,
    bags: list[workers.EmbeddingBag],
    reducer: Reducer,
    part: int,
    parts: int,
) -> Quality:
    """Return how good the predictions are of the clicks that follow. Each worker predicts its part of them."""
    later = range(args.steps, args.steps + args.test_steps)
    found = torch.zeros(3, args.test_steps, args.batch_size, dtype=torch.float64)
    batches = clicks.batches(later, args.batch_size, part, parts)
    for number, batch in enumerate(workers.lookahead(batches, ids_of_all(bags))):
        predicted = network(batch.dense, embedded(bags, batch)).double().sigmoid()
        mine = torch.stack([predicted, torch.from_numpy(batch.chances), batch.labels.double()])
        found[:, number, part::parts] = mine
    reducer.average({"found": found})
    return quality(*(found * parts).flatten(1).numpy())


if __name__ == "__main__":
    main()
