#!/usr/bin/env python3
"""Train a small transformer to write text, character by character, with one process or with many.

    python train_lm.py
    launch.py -n 2 -s 2 --launcher local "python train_lm.py"
    torchrun --nproc-per-node=2 train_lm.py

    launch.py -n 2 -s 2 -H hosts "python train_lm.py --inner-steps 16 --compress int8 --compress-back int8"  # slow line

The servers hold the weights and AdamW's state. Each worker trains on its own windows of the text, and clips its
gradient before the push. With --inner-steps, DiLoCo: each worker has an AdamW and trains alone, and the servers have
the outer optimizer.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from argparse import Namespace
from typing import NamedTuple

import torch
from lm import options, text
from lm.transformer import Transformer
from lm.updates import learning_rate, updates

import kvstore as kv
from workers import Reducer, callbacks


class Result(NamedTuple):
    """The end of a run.

    Attributes:
        bits: bits per character of the held-out text.
        seconds: how long the steps took, without the evaluations.
        sent, received: the bytes of gradients and weights that this worker has sent and received.
    """

    bits: float
    seconds: float
    sent: int
    received: int


def main() -> None:
    """Train as the command line says. Errors that the user can fix are printed in one line."""
    args = options.parse()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        with kv.create(args.kv_store) as store, Reducer(args.kv_store) as reducer:
            train(args, text.load(args.text or text.ours(), args.context), store, reducer)
    except (text.TextError, kv.KVStoreError) as exc:
        sys.exit(f"train_lm.py: error: {exc}")


def train(args: Namespace, corpus: text.Corpus, store: kv.KVStore, reducer: Reducer) -> Result:
    """Run one worker, together with the others. Rank 0 logs the progress."""
    torch.manual_seed(args.seed)
    model = Transformer(len(corpus.characters), args.context, args.layers, args.heads, args.width)
    say = logging.info if store.rank == 0 else logging.debug
    say(
        "%d characters to learn from, %d held out, %d different ones",
        *map(len, (corpus.training, corpus.validation, corpus.characters)),
    )
    say("%d parameters, %d workers", sum(parameter.numel() for parameter in model.parameters()), store.num_workers)
    update = updates(model, args, store)

    log = callbacks.Log(*args.log_to, rank=store.rank) if args.log_to else None
    seconds, bits = 0.0, math.inf
    for step in range(args.steps):
        began = time.perf_counter()
        batch = text.training_batch(
            corpus.training, args.batch_size, args.context, seed=args.seed, step=step, rank=store.rank
        )
        model.zero_grad()
        loss = model.loss(*batch)
        loss.backward()
        if args.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        rate = learning_rate(step, args.steps, args.warmup, args.lr, args.min_lr)
        update.step(rate)
        last = step + 1 == args.steps
        if last:
            update.finish()
        seconds += time.perf_counter() - began
        if (step + 1) % args.eval_every == 0 or last:
            with update.common_weights():
                bits = validate(model, corpus, args, store, reducer)
            if log:
                values = {"train/loss": loss, "validation/bits": bits, "learning_rate": rate, "seconds": seconds}
                log.log(values, step=step + 1)
            say(
                "Step[%d] Train-bits=%.3f Validation-bits=%.3f Time cost=%.1f",
                step + 1,
                loss.item() / math.log(2),
                bits,
                seconds,
            )

    if log:
        log.close()
    moved = store.statistics()
    result = Result(bits, seconds, moved.bytes_pushed, moved.bytes_pulled)
    if result.sent:
        say("Each worker sent %.2f MB and received %.2f MB", result.sent / 1e6, result.received / 1e6)
    if args.sample and store.rank == 0:
        start = corpus.encode("\n")
        written = corpus.decode(model.sample(start, args.sample, args.temperature, args.seed))
        say("Sample: %s", text.printable(written))
    return result


@torch.no_grad()
def validate(model: Transformer, corpus: text.Corpus, args: Namespace, store: kv.KVStore, reducer: Reducer) -> float:
    """Return bits per character on the held-out text. Each worker evaluates a share; all get the same result."""
    place = {"rank": store.rank, "workers": store.num_workers}
    nats = characters = 0.0
    for inputs, targets in text.validation_batches(corpus.validation, args.batch_size, args.context, **place):
        nats += model.loss(inputs, targets).item() * targets.numel()
        characters += targets.numel()
    total = reducer.sum({"nats": nats, "characters": characters})
    return total["nats"] / total["characters"] / math.log(2)


if __name__ == "__main__":
    main()
