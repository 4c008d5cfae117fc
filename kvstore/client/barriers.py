"""A worker's side of the barriers of one store."""

from __future__ import annotations

from typing import NamedTuple

from kvstore.client.requests import Requests
from kvstore.errors import UsageError
from kvstore.ticket import Operation


class _Barrier(NamedTuple):
    """How many barriers a worker has passed, and the operation of the one that it waits at."""

    passed: int = 0
    operation: Operation | None = None


class WorkerBarriers:
    """The barriers that one worker comes to, one after the other.

    An exception may end any call here; the next one waits on at the same barrier.

    Args:
        requests: to the scheduler.
    """

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        self._at = _Barrier()

    @property
    def passed(self) -> int:
        """How many this worker has passed."""
        return self._at.passed

    def wait(self) -> None:
        """Come to the next barrier, and return when all workers have come.

        Raises:
            DeadlineExceeded: others are late. This worker has come all the same.
            UsageError: somebody has joined, and nobody was let through.
        """
        passed, operation = self._at
        if operation is None:
            self._requests.barrier(passed + 1, self._arrived)
            operation = self._at.operation
        try:
            if operation is not None:
                operation.wait()
        except UsageError:
            self._at = _Barrier(passed)
            raise
        self._at = _Barrier(passed + 1)

    def _arrived(self, operation: Operation) -> None:
        self._at = self._at._replace(operation=operation)
