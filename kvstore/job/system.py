"""The operating system: which ones the project runs on, and the cores that it gives this process."""

from __future__ import annotations

import os
import sys


def cores() -> int:
    """The number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def unsupported(what: str) -> str:
    """Why something that takes several processes does not run on this system; empty if it does.

    Args:
        what: what the user has called: ``launch.py``, ``kv.create('dist_sync')``.
    """
    if sys.platform == "win32":
        return (
            f"{what} runs on Linux and macOS, but not on Windows, which lacks the processes, sockets and locks that it "
            "uses; run it in WSL 2 (wsl --install), where it is Linux. Stores in one process ('local', 'device') do "
            "not need it"
        )
    return ""
