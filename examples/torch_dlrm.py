#!/usr/bin/env python3
"""Train DLRM on a stream of clicks in one process, with torch alone: what train_dlrm.py is compared with.

    python torch_dlrm.py

The embeddings have a row for every id that can come. So the program must know the ids beforehand, as numbers from 0,
and their rows and states must fit into its memory.
"""

from __future__ import annotations

import time
from argparse import Namespace

import numpy as np
import torch
from clicks import options
from clicks.auc import Quality, auc, quality
from clicks.dlrm import DLRM
from clicks.stream import DENSE, Batch, Clicks
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits


def main() -> None:
    """Train as the command line says."""
    args = options.parse(alone=True)
    clicks = stream(args)
    torch.manual_seed(args.seed)
    print(train(args, clicks, embeddings(clicks.rows(args.steps + args.test_steps), args.dim)))


def stream(args: Namespace) -> Clicks:
    """Return the clicks that the command line asks for."""
    return Clicks(args.seed, args.fields, largest=args.largest, period=args.period)


def embeddings(rows: list[int], dim: int) -> nn.ModuleList:
    """Return the embeddings of the fields."""
    bags = nn.ModuleList(nn.EmbeddingBag(count, dim, mode="sum", sparse=True) for count in rows)
    for bag in bags:
        nn.init.normal_(bag.weight, std=options.SCALE)
    return bags


def train(args: Namespace, clicks: Clicks, bags: nn.ModuleList) -> Quality:
    """Train, and return how good the predictions of later clicks are."""
    torch.manual_seed(args.seed)
    network = DLRM(DENSE, args.fields, args.dim, args.hidden)
    dense = torch.optim.Adam(network.parameters(), lr=args.lr, fused=True)
    sparse = torch.optim.SparseAdam(list(bags.parameters()), lr=args.row_lr)
    began, scores, labels = time.perf_counter(), [], []
    for step, batch in enumerate(clicks.batches(range(args.steps), args.batch_size), 1):
        logits = network(batch.dense, embedded(bags, batch))
        dense.zero_grad()
        sparse.zero_grad()
        binary_cross_entropy_with_logits(logits, batch.labels).backward()
        dense.step()
        sparse.step()
        scores.append(logits.detach().numpy())
        labels.append(batch.labels.numpy())
        if step % args.disp_steps == 0:
            rate = args.disp_steps * args.batch_size / (time.perf_counter() - began)
            print(f"Step[{step}] AUC={auc(np.concatenate(scores), np.concatenate(labels)):.4f} Samples/s={rate:.0f}")
            began, scores, labels = time.perf_counter(), [], []
    return evaluate(args, clicks, network, bags)


def embedded(bags: nn.ModuleList, batch: Batch) -> list[Tensor]:
    """Return the vectors of each field."""
    return [bag(batch.rows[:, field : field + 1]) for field, bag in enumerate(bags)]


@torch.no_grad()
def evaluate(args: Namespace, clicks: Clicks, network: DLRM, bags: nn.ModuleList) -> Quality:
    """Return how good the predictions are of the clicks that follow."""
    later = range(args.steps, args.steps + args.test_steps)
    batches = list(clicks.batches(later, args.batch_size))
    predicted = [network(batch.dense, embedded(bags, batch)).double().sigmoid().numpy() for batch in batches]
    true, labels = [batch.chances for batch in batches], [batch.labels.numpy() for batch in batches]
    return quality(*map(np.concatenate, (predicted, true, labels)))


if __name__ == "__main__":
    main()
