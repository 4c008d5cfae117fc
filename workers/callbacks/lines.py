"""MXNet's log lines: speed and metrics."""

from __future__ import annotations

import time
from collections.abc import Callable

from workers.callbacks.param import BatchEndParam
from workers.common.run_log import log_line


class Speedometer:
    """Logs a worker's speed, and the metric of its own batches, after every ``frequent`` batches.

    As in MXNet the clock starts when an epoch's first batch ends, so that its start-up time does not count.

    Args:
        batch_size: the samples in a batch of this worker.
        frequent: the number of batches between lines.
        auto_reset: whether each line's metric covers the batches since the last line; otherwise the epoch so far.
    """

    def __init__(self, batch_size: int, frequent: int = 50, auto_reset: bool = True) -> None:
        self.batch_size, self.frequent, self.auto_reset = batch_size, frequent, auto_reset
        self._since = self._last = -1
        self._tic = 0.0

    def __call__(self, param: BatchEndParam) -> None:
        """Count a batch, and log if it is time."""
        begun, self._last = 0 <= self._last < param.nbatch, param.nbatch
        if not begun:
            self._since, self._tic = param.nbatch, time.perf_counter()
        elif param.nbatch % self.frequent == 0:
            pairs = param.eval_metric.get_name_value() if param.eval_metric else []  # this waits for the device
            now = time.perf_counter()
            speed = (param.nbatch - self._since) * self.batch_size / max(now - self._tic, 1e-9)
            shown = "".join(f"\t{name}={value:f}" for name, value in pairs)
            log_line(
                param.rank, "Epoch[%d] Batch [%d]\tSpeed: %.2f samples/sec%s", param.epoch, param.nbatch, speed, shown
            )
            if param.eval_metric and self.auto_reset:
                param.eval_metric.reset_local()
            self._since, self._tic = param.nbatch, now


def log_train_metric(period: int, auto_reset: bool = False) -> Callable[[BatchEndParam], None]:
    """Return a callback that logs the metric every ``period`` batches, and then resets it if ``auto_reset``."""

    def callback(param: BatchEndParam) -> None:
        if param.nbatch % period or param.eval_metric is None:
            return
        for name, value in param.eval_metric.get_name_value():
            log_line(param.rank, "Iter[%d] Batch[%d] Train-%s=%f", param.epoch, param.nbatch, name, value)
        if auto_reset:
            param.eval_metric.reset_local()

    return callback


class LogValidationMetricsCallback:
    """Logs the metric at the end of an evaluation; ``fit`` itself also does."""

    def __call__(self, param: BatchEndParam) -> None:
        """Log the metric."""
        for name, value in param.eval_metric.get_name_value() if param.eval_metric else []:
            log_line(param.rank, "Epoch[%d] Validation-%s=%f", param.epoch, name, value)
