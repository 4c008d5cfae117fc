"""What streams of events send: the latest state of the job, handed from the thread that looks to those that serve."""

from __future__ import annotations

import threading
import time


class Feed:
    """One message, and its successors. A reader that is slow misses some, and never holds up others."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._number = 0
        self._message = b""
        self._closed = False

    def publish(self, message: bytes) -> None:
        """Put a message in the place of the latest, unless that was the last."""
        with self._changed:
            if self._closed:
                return
            self._number += 1
            self._message = message
            self._changed.notify_all()

    def close(self) -> None:
        """Say that the latest message was the last."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def after(self, number: int, timeout_s: float) -> tuple[int, bytes, bool]:
        """Wait for a message after the one with ``number``.

        Returns:
            The latest message's number, the message, or nothing if none came in time, and whether it is the last.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self._number <= number and not self._closed:
                left = deadline - time.monotonic()
                if left <= 0:
                    return number, b"", False
                self._changed.wait(left)
            fresh = self._number > number
            return self._number, self._message if fresh else b"", self._closed
