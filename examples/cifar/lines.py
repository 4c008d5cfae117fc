"""Lines of other programs: d2l's after each epoch, and the speed of reading alone."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Any


class EpochLine:
    """Prints what d2l's script does after each epoch; an `epoch_end_callback` of `fit`, with the metric `loss`."""

    def begin(self, run: Any) -> None:
        """Be told what to look at."""
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


def test_io(batches: Iterable[Any], batch_size: int, frequent: int) -> None:
    """Read an epoch and train nothing; log how fast that is."""
    start = time.perf_counter()
    for number, _ in enumerate(batches):
        if (number + 1) % frequent == 0:
            now = time.perf_counter()
            logging.info("Batch [%d]\tSpeed: %.2f samples/sec", number, frequent * batch_size / (now - start))
            start = now
