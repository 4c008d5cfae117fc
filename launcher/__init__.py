"""Starts a job: `launch.py` from the command line, or `launcher.run(train)` from a script or notebook.

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
