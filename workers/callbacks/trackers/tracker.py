"""The protocol of a tracker, and trackers made of functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol


class Tracker(Protocol):
    """What a ``Log`` writes to. Any object with these two methods is one."""

    def log(self, values: Mapping[str, float], step: int) -> object:
        """Keep the values of a step.

        Args:
            values: numbers by name.
            step: the number of the step. It mostly grows from call to call. It may be the same, with other names.
        """

    def close(self) -> object:
        """Write what has not been written, and release everything. Called once."""


@dataclass(frozen=True)
class TrackerOfFunctions:
    """See ``tracker_of``."""

    log: Callable[..., object]
    close: Callable[[], object]


def tracker_of(log: Callable[..., Any], close: Callable[[], Any] | None = None) -> Tracker:
    """Return a tracker that is made of functions, such as those of another library.

        tracker_of(run.log, run.finish)                  # of W&B's run
        tracker_of(mlflow.log_metrics, mlflow.end_run)

    Args:
        log: called as ``log(values, step)`` with a dict of numbers by name, and the number of the step.
        close: called at the end, without arguments; None for nothing.
    """
    return TrackerOfFunctions(log, _nothing if close is None else close)


def _nothing() -> None:
    """Do nothing."""
