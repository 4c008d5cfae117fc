"""The faults that launch.py itself injects, by the time. No I/O.

Faults by rounds are injected by the process that has the round: its environment names them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from launcher.job.injection import Injection
from launcher.job.tasks import Task


class Drill:
    """The faults of one job that come by the time.

    Args:
        tasks: its processes.
        injections: its faults; those by rounds are left out.
    """

    def __init__(self, tasks: Sequence[Task], injections: Iterable[Injection]) -> None:
        self._indices = {(task.role, task.rank): index for index, task in enumerate(tasks)}
        timed = [(injection.after_s, injection) for injection in injections if injection.after_s is not None]
        self._left = sorted(timed, key=lambda fault: fault[0])
        self._began: float | None = None

    def due(self, now: float) -> list[tuple[int, Injection]]:
        """The faults whose time has come, each with the index of its task. The first call is the start of the job."""
        if not self._left:
            return []
        if self._began is None:
            self._began = now
        due = []
        while self._left and now >= self._began + self._left[0][0]:
            injection = self._left.pop(0)[1]
            due.append((self._indices[injection.member], injection))
        return due

    @property
    def wake(self) -> float | None:
        """When the next one is due; None for no such time."""
        return None if self._began is None or not self._left else self._began + self._left[0][0]
