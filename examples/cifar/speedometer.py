"""Counts for the lines that say how fast and how well training goes; named after MXNet's."""

from __future__ import annotations

import logging
import time

from torch import Tensor


class Speedometer:
    """Follows one epoch, and logs a line after every `frequent` batches."""

    def __init__(self, epoch: int, frequent: int) -> None:
        self.epoch, self._frequent = epoch, frequent
        self._start = self._last = time.perf_counter()
        self._batches = 0
        self._whole, self._recent = Accuracy(), Accuracy()

    def update(self, right: Tensor, count: int) -> None:
        """One more batch of `count` pictures, of which `right` were guessed right."""
        self._recent.add(right, count)
        self._whole.add(right, count)
        self._batches += 1
        if self._batches % self._frequent == 0:
            accuracy, now = self._recent.value, time.perf_counter()  # asking for the value waits for the device
            speed = self._recent.count / (now - self._last)
            logging.info(
                "Epoch[%d] Batch [%d]\tSpeed: %.2f samples/sec\taccuracy=%f", self.epoch, self._batches, speed, accuracy
            )
            self._recent, self._last = Accuracy(), now

    def finish(self) -> None:
        """Log the lines at the end of the epoch."""
        logging.info("Epoch[%d] Train-accuracy=%f", self.epoch, self._whole.value)
        logging.info("Epoch[%d] Time cost=%.3f", self.epoch, time.perf_counter() - self._start)


class Accuracy:
    """The part of the pictures that was guessed right."""

    def __init__(self) -> None:
        self.right: Tensor | int = 0  # a tensor on the device: adding to it does not wait
        self.count = 0

    def add(self, right: Tensor, count: int) -> None:
        """`count` more pictures."""
        self.right = self.right + right
        self.count += count

    @property
    def value(self) -> float:
        """From 0 to 1."""
        return float(self.right) / max(self.count, 1)
