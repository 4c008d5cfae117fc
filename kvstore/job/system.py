"""The operating system: on which ones the project runs, and what a process has and uses of its cores and memory."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path


def cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def unsupported(what: str) -> str:
    """Why ``what``, such as ``launch.py``, does not run on this system; empty if it does."""
    if sys.platform == "win32":
        return (
            f"{what} runs on Linux and macOS, but not on Windows, which lacks the processes, sockets and locks that it "
            "uses; run it in WSL 2 (wsl --install), where it is Linux. Stores in one process ('local', 'device') do "
            "not need it"
        )
    return ""


STATM = Path("/proc/self/statm")  # proc(5): sizes in pages, the second one that of what is in memory


def memory_bytes(statm: Path = STATM) -> int:
    """Return how many bytes of this process are in memory; where the system has no /proc, the most there have been."""
    try:
        return int(statm.read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # getrusage(2): kilobytes, on macOS bytes
        return peak if sys.platform == "darwin" else 1024 * peak


def own_memory_bytes(statm: Path = STATM) -> int:
    """Return how many of these bytes are neither files nor shared; 0 where the system has no /proc."""
    try:
        _, resident, shared = statm.read_bytes().split()[:3]
    except (OSError, ValueError):
        return 0
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def cpu_us() -> int:
    """The processor time that this process has used, all threads together, in microseconds."""
    return time.process_time_ns() // 1000
