"""What this process uses of its machine."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

STATM = Path("/proc/self/statm")  # proc(5): sizes in pages, the second one that of what is in memory


def memory_bytes(statm: Path = STATM) -> int:
    """Return how many bytes of this process are in memory; where the system has no /proc, the most there have been."""
    try:
        return int(statm.read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # getrusage(2): kilobytes, on macOS bytes
        return peak if sys.platform == "darwin" else 1024 * peak


def cpu_us() -> int:
    """Return the microseconds of processor time that this process has used, all threads together."""
    return time.process_time_ns() // 1000
