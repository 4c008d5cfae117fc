"""The interface of a launcher."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from launcher.job.description import Job
from launcher.supervision.supervisor import OnFailure

# Fields of ``Cluster`` that all launchers use whose processes are supervised by launch.py, and by it through agents.
SUPERVISED = frozenset(
    {
        "dashboard",
        "dashboard_token_file",
        "trace",
        "host_aggregation",
        "replicas",
        "restarts",
        "inject",
        "max_readers",
        "readers",
        "gpus_per_worker",
    }
)
WITH_AGENTS = SUPERVISED | {"python", "host_ip", "interface", "encryption"}


@dataclass(frozen=True)
class Kind:
    """One launcher.

    Args:
        run: runs a job, waits for its end, and returns launch.py's exit code. It raises LaunchError if the job cannot
            be started; then none of its processes runs.
        dry_run: describes what `run` would do. It reads the files that the job names, and does nothing else. The text
            shows no value of a variable that the user has set, and no key.
        takes: the fields of `Cluster` that it uses.
    """

    run: Callable[[Job, OnFailure], int]
    dry_run: Callable[[Job], str]
    takes: frozenset[str]
