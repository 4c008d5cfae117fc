"""A worker that trains a small transformer on characters, and may be killed: how many samples have counted, and when.

Each step sleeps for most of its time. So processes that start on the same cores hardly slow it down, as if each worker
had an accelerator of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import kvstore as kv
from benchmarks.jobs import ROOT
from benchmarks.programs.stopwatch import report
from workers import DiLoCo, Trainer

sys.path.insert(0, str(ROOT / "examples"))

from lm import text
from lm.transformer import Transformer

WAYS = ("sync", "diloco")
BATCH, CONTEXT = 8, 32
INNER_STEPS, QUORUM = 50, 2
LAYERS, HEADS, WIDTH = 2, 2, 32
HELD_OUT = 64  # batches that the loss at the end is of


def main() -> None:
    """Train until the time is over; the first worker that is left says what the loss is."""
    options = argparse.ArgumentParser()
    options.add_argument("--way", choices=WAYS, required=True)
    options.add_argument("--seconds", type=float, required=True, help="how long the job trains")
    options.add_argument("--step-s", type=float, required=True, help="how long a step takes")
    options.add_argument("--slow", type=int, default=-1, help="the rank whose steps take twice as long")
    options.add_argument("--folder", type=Path, required=True, help="in which each worker notes its samples")
    options.add_argument("--report", type=Path, required=True)
    args = options.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    corpus = text.load([ROOT / "CHANGELOG.md"], CONTEXT)
    model = Transformer(len(corpus.characters), CONTEXT, LAYERS, HEADS, WIDTH)
    rule = {"quorum": QUORUM, "late": "keep", "grace": 2 * args.step_s} if args.way == "diloco" else {}
    store = kv.create("dist_sync", **rule)
    step_s = args.step_s * (2 if store.rank == args.slow else 1)

    def gradients(step: int) -> None:
        began = time.monotonic()
        batch = text.training_batch(corpus.training, BATCH, CONTEXT, seed=store.rank, step=step, rank=store.rank)
        model.zero_grad()
        model.loss(*batch).backward()
        time.sleep(max(0.0, began + step_s - time.monotonic()))

    with (args.folder / f"samples-{store.rank}").open("a", buffering=1) as samples:

        def note(count: int) -> None:
            print(time.time(), count, file=samples)

        (sync if args.way == "sync" else diloco)(args, store, model, gradients, note)
    if store.rank == store.members()[0]:
        with torch.no_grad():
            held_out = text.validation_batches(corpus.validation, BATCH, CONTEXT, rank=0, workers=1)
            losses = [float(model.loss(*batch)) for _, batch in zip(range(HELD_OUT), held_out, strict=False)]
        report(args.report, loss=sum(losses) / len(losses))
    store.barrier()


OfNumber = Callable[[int], None]


def sync(args: argparse.Namespace, store: kv.KVStore, model: Transformer, gradients: OfNumber, note: OfNumber) -> None:
    """Make as many rounds as the time has steps; note each when it is over."""
    trainer = Trainer(model.named_parameters(), "adamw", {"learning_rate": 2e-3}, store)
    trainer.come_back()
    while trainer.num_update < args.seconds / args.step_s:
        gradients(trainer.num_update)
        trainer.step()
        note(BATCH)


def diloco(
    args: argparse.Namespace, store: kv.KVStore, model: Transformer, gradients: OfNumber, note: OfNumber
) -> None:
    """Train until the time is over, which begins with the first worker; note what has been sent."""
    inner = torch.optim.AdamW(model.parameters(), lr=2e-3)
    outer = DiLoCo(model, inner, store, INNER_STEPS, weight="samples")
    outer.come_back()
    end = args.folder / "end"
    with contextlib.suppress(FileExistsError), end.open("x") as file:
        file.write(str(time.time() + args.seconds))
    while not end.read_text():
        time.sleep(0.01)
    until, rounds, unsent = float(end.read_text()), 0, 0
    while time.time() < until:
        gradients(outer.steps)
        outer.step(samples=BATCH)
        unsent += BATCH
        if outer.rounds > rounds:
            note(unsent)
            rounds, unsent = outer.rounds, 0
    outer.finish()
    note(unsent)


if __name__ == "__main__":
    main()
