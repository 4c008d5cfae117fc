"""What a kind of cluster is to launch.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from launcher.job.description import Job
from launcher.supervision.supervisor import OnFailure


@dataclass(frozen=True)
class Kind:
    """One kind of cluster.

    Args:
        run: runs a job there, waits for its end, and returns launch.py's exit code; raises LaunchError if it cannot be
            started, and then nothing of it runs.
        dry_run: the text of what `run` would do; reads the files that the job names, and does nothing. It shows
            no value of a variable that the user has set, and no key.
        takes: the fields of `Cluster` that mean something there.
    """

    run: Callable[[Job, OnFailure], int]
    dry_run: Callable[[Job], str]
    takes: frozenset[str]
