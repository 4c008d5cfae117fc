#!/usr/bin/env python3
"""Train a factorization machine in one process, with torch alone: what train_fm.py is compared with.

python torch_fm.py
python torch_fm.py --data train.libsvm --test-data test.libsvm --input-size 1000000
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator

import numpy as np
import torch
from clicks.auc import Quality, quality
from clicks.stream import Clicks
from fm import data, options
from fm.data import Samples
from fm.machine import logits
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

TEST_BATCHES = 20


def main() -> None:
    """Train as the command line says. Errors that the user can fix are printed in one line."""
    args = options.parse(alone=True)
    try:
        print(train(args, nn.Parameter(torch.zeros(args.input_size, 1)), first_factors(args)))
    except data.DataError as exc:
        sys.exit(f"torch_fm.py: error: {exc}")


def first_factors(args: Namespace) -> nn.Parameter:
    """Return the factors before training."""
    generator = torch.Generator().manual_seed(args.seed)
    return nn.Parameter(torch.randn(args.input_size, args.factor_size, generator=generator) * options.SIGMA)


def batches(args: Namespace, epoch: int, part: int = 0, parts: int = 1) -> Iterator[Samples]:
    """Return a worker's part of the batches of an epoch, which for clicks are new ones in each."""
    if args.data:
        return data.libsvm(args.data, args.batch_size, args.input_size, part, parts)
    steps = max(1, args.clicks // args.batch_size)
    numbers = range(epoch * steps, (epoch + 1) * steps)
    return data.clicks(Clicks(args.seed), numbers, args.batch_size, args.input_size, part, parts)


def test_batches(args: Namespace) -> Iterator[Samples]:
    """Return the batches that are not trained on; of clicks those that follow."""
    if args.test_data:
        return data.libsvm(args.test_data, args.batch_size, args.input_size)
    first = args.num_epoch * max(1, args.clicks // args.batch_size)
    numbers = range(first, first + TEST_BATCHES)
    return data.clicks(Clicks(args.seed), numbers, args.batch_size, args.input_size, 0, 1)


def train(args: Namespace, linear: nn.Parameter, factors: nn.Parameter) -> Quality:
    """Train, and return how good the predictions of other samples are."""
    bias = nn.Parameter(torch.zeros(1))
    sparse = torch.optim.SparseAdam([linear, factors], lr=args.lr)
    dense = torch.optim.Adam([bias], lr=args.lr, fused=True)
    for epoch in range(args.num_epoch):
        losses = []
        for number, batch in enumerate(batches(args, epoch), 1):
            loss = binary_cross_entropy_with_logits(predicted(batch, linear, factors, bias), batch.labels)
            sparse.zero_grad()
            dense.zero_grad()
            loss.backward()
            sparse.step()
            dense.step()
            losses.append(loss.item())
            if number % args.log_interval == 0:
                print(f"Epoch[{epoch}] Batch [{number}] log_loss={np.mean(losses):.4f}")
                losses.clear()
    tested = list(test_batches(args))
    with torch.no_grad():
        chances = [predicted(batch, linear, factors, bias).double().sigmoid().numpy() for batch in tested]
    return quality_of(chances, tested)


def predicted(batch: Samples, linear: torch.Tensor, factors: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return the logits of a batch, with whole tables."""
    weights = nn.functional.embedding(batch.ids, linear, sparse=True).squeeze(2)
    return logits(batch.values, weights, nn.functional.embedding(batch.ids, factors, sparse=True), bias)


def quality_of(chances: list[np.ndarray], tested: list[Samples]) -> Quality:
    """Return how good predicted chances are."""
    labels = np.concatenate([batch.labels.numpy() for batch in tested])
    true = np.concatenate([batch.chances for batch in tested])
    return quality(np.concatenate(chances), true, labels)


if __name__ == "__main__":
    main()
