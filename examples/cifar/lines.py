"""Log lines of other programs: d2l's epoch line, MXNet's monitor, and the speed of reading alone."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Any

from workers.callbacks import BatchEndParam


class EpochLine:
    """Prints d2l's line after each epoch; an `epoch_end_callback` of `fit`. It needs the metric `loss`."""

    def begin(self, run: Any) -> None:
        """Remember the run."""
        self._run, self._start = run, time.perf_counter()

    def __call__(self, epoch: int, *_: Any) -> None:
        """Print the line."""
        values, lr = self._run.history[-1], self._run.trainer.learning_rate
        seconds, self._start = time.perf_counter() - self._start, time.perf_counter()
        print(
            f"epoch {epoch + 1}, loss {values['train-loss']:f}, train acc {values['train-accuracy']:f}, "
            f"test acc {values['validation-accuracy']:f}, time {seconds:.2f} sec, lr {lr:g}",
            flush=True,
        )


class Monitor:
    """Logs every parameter's norm over the root of its size, like MXNet's `Monitor`; a `batch_end_callback` of `fit`.

    Args:
        interval: the number of batches between logs, which begin with the first batch.
    """

    def __init__(self, interval: int) -> None:
        self._interval, self._batches = interval, 0

    def __call__(self, param: BatchEndParam) -> None:
        """Log the norms, if it is time."""
        if self._batches % self._interval == 0:
            for name, value in param.locals["model"].named_parameters():
                size = (value.detach().norm() / value.numel() ** 0.5).item()
                logging.info("Batch: %7d %-30s %g", self._batches, name, size)
        self._batches += 1


def test_io(batches: Iterable[Any], batch_size: int, frequent: int) -> None:
    """Read an epoch without training, and log the speed."""
    start = time.perf_counter()
    for number, _ in enumerate(batches):
        if (number + 1) % frequent == 0:
            now = time.perf_counter()
            logging.info("Batch [%d]\tSpeed: %.2f samples/sec", number, frequent * batch_size / (now - start))
            start = now
