"""Starts a job: `launch.py` from the command line, or `launcher.run(train)` from a script or notebook.

launch       `launch.py`
cli          its command line
options/     the options by subject
calls/       `launcher.run`: workers that call a Python function
kinds/       the launchers: local, ssh, mpi, slurm, sge, yarn, kubernetes
agents/      processes on other hosts, through an agent there
processes/   processes on this machine
hosts/       hostfiles, placement, addresses
supervision/ the loop around a job: when and how it ends
output/      where the lines of a job's processes go
job/         what to run: the job, its processes, the environment of each. No I/O
errors       what a user is told when a job cannot be started, or has failed

Nothing here imports torch or ZeroMQ before it is needed: launch.py must start at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import kvstore

if not hasattr(kvstore, "create"):  # a module of the user's has the name
    raise ImportError(f"launcher needs the package kvstore, but `import kvstore` gives {kvstore}; rename that file")

from kvstore.job.system import unsupported
from launcher.errors import LaunchError, WorkerFailed

if TYPE_CHECKING:
    from launcher.calls.run import run

__all__ = ["LaunchError", "WorkerFailed", "run"]


def __dir__() -> list[str]:
    return list(__all__)


def __getattr__(name: str) -> Any:
    """Import `run` on first use, because launch.py needs no multiprocessing."""
    if name == "run":
        if why := unsupported("launcher.run"):
            raise LaunchError(why)
        from launcher.calls.run import run

        return run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
