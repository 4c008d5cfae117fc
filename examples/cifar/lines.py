"""Lines that `fit` does not print: d2l's epoch line, MXNet's monitor, the speed of reading alone, and the last ones."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Iterable, Iterator
from typing import Any

import closing

from cifar import options
from kvstore import KVStore
from workers.callbacks import BatchEndParam

MORE = 4  # workers that are suggested to whoever has fewer


class Summary:
    """Prints what a run of `fit` has reached and cost, and what to try next. As a callback it learns of the run.

    Args:
        args: the options of the run.
        store: the store that the run uses.
        batches: how many batches this worker has in an epoch.
    """

    def __init__(self, args: Namespace, store: KVStore, batches: int) -> None:
        self._args, self._store, self._batches = args, store, batches

    def announce(self) -> None:
        """Print what is about to be trained, on rank 0."""
        args, count = self._args, self._store.num_workers
        if self._store.rank == 0:
            network = f"{args.network} of {args.num_layers} layers" if args.network == "resnet" else args.network
            epochs, workers = closing.counted(args.num_epochs, "epoch"), closing.counted(count, "worker")
            print(
                f"training {network} for {epochs}: {workers}, store {self._store.type}, "
                f"{self._batches} batches of {args.batch_size} pictures per worker and epoch",
                flush=True,
            )

    def begin(self, run: Any) -> None:
        """Remember where the run begins."""
        self._run, self._start, self._updates = run, time.perf_counter(), run.trainer.num_update

    def __call__(self, *_: Any) -> None:
        """Be an `epoch_end_callback`."""

    def show(self) -> None:
        """Print the summary on rank 0, after `fit` has returned."""
        if self._store.rank or not self._run.history:
            return
        seconds, rounds = time.perf_counter() - self._start, self._run.trainer.num_update - self._updates
        values = self._run.history[-1]
        kind = "validation" if "validation-accuracy" in values else "train"
        accuracy = values[f"{kind}-accuracy"]
        print(f"{kind} accuracy {accuracy:.4f} after {closing.counted(self._run.epoch, 'epoch')}")
        unit = "rounds" if self._waits else "steps"
        print(closing.cost(seconds, rounds, self._store.statistics(), unit))
        print(closing.try_next(list(self._suggestions())), flush=True)

    @property
    def _waits(self) -> bool:
        """Whether the workers wait for each other in every round."""
        return "async" not in self._store.type and "ssp" not in self._store.type

    def _suggestions(self) -> Iterator[tuple[str, str]]:
        """Yield what to try, and the command for it, which works with the options of this run."""
        args, workers = self._args, self._store.num_workers
        if not self._store.type.startswith("dist"):
            if self._batches >= closing.WORKERS:
                yield "two workers and two servers", closing.command("--kv-store", "dist_sync")
            return
        if workers < MORE <= workers * self._batches:  # there are pictures enough for a batch of each
            yield f"{MORE} workers, each with its part of the pictures", closing.command(num_workers=MORE)
        if not args.gc_type:
            yield "gradients in a quarter of the bytes", closing.command("--gc-type", "int8")
        if self._waits:
            # Momentum makes updates that do not wait too large. Without it, steps may be larger.
            other = ("--mom", "0", "--lr", f"{4 * args.lr:g}") if "momentum" in options.optimizer_params(args) else ()
            yield "no worker waits for another", closing.command("--kv-store", "dist_async", *other)


class EpochLine:
    """Prints d2l's line after each evaluation, on rank 0; an `epoch_end_callback` of `fit`. It needs `loss`."""

    def begin(self, run: Any) -> None:
        """Remember the run."""
        self._run, self._start = run, time.perf_counter()

    def __call__(self, *_: Any) -> None:
        """Be an `epoch_end_callback`."""

    def evaluated(self, param: BatchEndParam) -> None:
        """Print the line."""
        if not self._run.history:  # the evaluation of a run before this one, which has gone on from a checkpoint
            return
        values, lr = self._run.history[-1], self._run.trainer.learning_rate
        seconds, self._start = time.perf_counter() - self._start, time.perf_counter()
        if self._run.rank:
            return
        print(
            f"epoch {param.epoch + 1}, loss {values['train-loss']:f}, train acc {values['train-accuracy']:f}, "
            f"test acc {values['validation-accuracy']:f}, time {seconds:.2f} sec, lr {lr:g}",
            flush=True,
        )


class Monitor:
    """Prints every parameter's norm over the root of its size, like MXNet's `Monitor`; a `batch_end_callback` of `fit`.

    Args:
        interval: the number of batches between prints, which begin with the first batch.
    """

    def __init__(self, interval: int) -> None:
        self._interval, self._batches = interval, 0

    def __call__(self, param: BatchEndParam) -> None:
        """Print the norms on rank 0, if it is time."""
        if param.rank == 0 and self._batches % self._interval == 0:
            for name, value in param.locals["model"].named_parameters():
                size = (value.detach().norm() / value.numel() ** 0.5).item()
                print(f"Batch: {self._batches:7d} {name:30s} {size:g}", flush=True)
        self._batches += 1


def test_io(batches: Iterable[Any], batch_size: int, frequent: int) -> None:
    """Read an epoch without training, and print the speed."""
    begin = start = time.perf_counter()
    number = -1
    for number, _ in enumerate(batches):
        if (number + 1) % frequent == 0:
            now = time.perf_counter()
            print(f"Batch [{number}]\tSpeed: {frequent * batch_size / (now - start):.2f} samples/sec", flush=True)
            start = now
    seconds = time.perf_counter() - begin
    print(
        f"read {closing.counted(number + 1, 'batch', 'batches')} of {batch_size} pictures in {seconds:.1f} s",
        flush=True,
    )
