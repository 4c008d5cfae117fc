"""The kinds of cluster that a job can be started on, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from launcher import local
from launcher.errors import LaunchError
from launcher.job import Job
from launcher.supervisor import OnFailure

Launcher = Callable[[Job, OnFailure], int]

# What MXNet's launch.py knows, and this one will. To add one: write its file, and put its `run` into LAUNCHERS.
NAMES = ("local", "ssh", "mpi", "sge", "yarn", "slurm", "kubernetes")
LAUNCHERS: Mapping[str, Launcher] = MappingProxyType({"local": local.run})


def find(name: str) -> Launcher:
    """The function that runs a job on that kind of cluster.

    Raises:
        LaunchError: there is none; the message lists those that are.
    """
    try:
        return LAUNCHERS[name]
    except KeyError:
        state = "is not there yet" if name in NAMES else "does not exist"
        raise LaunchError(f"launcher {name} {state}; these work today: {', '.join(LAUNCHERS)}") from None
