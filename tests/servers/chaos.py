"""A network that repeats, delays and reorders messages, and loses none.

    chaos = Chaos(seed=3)
    with chaos, ThreadedJob(workers=2, servers=2, network=chaos.network) as cluster: ...

What happens to the n-th message is decided by the seed alone. A thread delivers the messages when they are due.
"""

from __future__ import annotations

import heapq
import itertools
import random
import threading
import time
from collections.abc import Callable
from typing import Any

from inproc import InprocNetwork

Put = Callable[[], None]


class Chaos:
    """See the module.

    Args:
        seed: decides what happens to which message.
        repeated: the part of messages that is delivered twice.
        delayed: the part of deliveries that is late.
        longest_s: how late at most.
    """

    def __init__(self, seed: int, repeated: float = 0.3, delayed: float = 0.5, longest_s: float = 0.004) -> None:
        self.network = InprocNetwork()
        self.network.deliver = self.deliver
        self.messages = self.deliveries = self.overtaken = 0
        self._random = random.Random(seed)
        self._repeated, self._delayed, self._longest_s = repeated, delayed, longest_s
        self._changed = threading.Condition()
        self._due: list[tuple[float, int, int, Put]] = []  # when, tie-breaker, which message, how
        self._numbers = itertools.count()
        self._closed = False
        self._thread = threading.Thread(target=self._pump, name="chaos")

    def decide(self) -> list[float]:
        """The delays of the next message's deliveries: at least one."""
        copies = 2 if self._random.random() < self._repeated else 1
        return [
            self._random.random() * self._longest_s if self._random.random() < self._delayed else 0.0
            for _ in range(copies)
        ]

    def deliver(self, put: Put) -> None:
        with self._changed:
            number = self.messages
            self.messages += 1
            now = time.monotonic()
            for delay in self.decide():
                heapq.heappush(self._due, (now + delay, next(self._numbers), number, put))
            self._changed.notify()

    def __enter__(self) -> Chaos:
        self._thread.start()
        return self

    def __exit__(self, *exc: Any) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _pump(self) -> None:
        latest = -1
        while True:
            with self._changed:
                while not self._closed and (not self._due or self._due[0][0] > time.monotonic()):
                    self._changed.wait(self._due[0][0] - time.monotonic() if self._due else None)
                if not self._due:
                    return
                _, _, number, put = heapq.heappop(self._due)
                self.deliveries += 1
                self.overtaken += number < latest
                latest = max(latest, number)
            put()
