"""Starting a job: `launch.py`, and one file per kind of cluster; or `launcher.run(train)`, from a script or notebook.

What to run is pure (`job`, `command`, `tasks`), when it ends is pure (`ending`), and everything that touches processes,
pipes or directories is in the files that say so. Nothing here imports torch or zmq: launch.py must start at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from launcher.errors import LaunchError, WorkerFailed

if TYPE_CHECKING:
    from launcher.calls.run import run

__all__ = ["LaunchError", "WorkerFailed", "run"]


def __getattr__(name: str) -> Any:
    """`run` is imported when somebody asks for it: launch.py does without multiprocessing."""
    if name == "run":
        from launcher.calls.run import run

        return run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
