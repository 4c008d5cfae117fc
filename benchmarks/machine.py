"""What figures depend on besides the code: the machine, and the versions of software."""

from __future__ import annotations

import datetime
import os
import platform
from importlib import metadata
from pathlib import Path


def facts() -> dict[str, str]:
    """Return facts about this machine, for the title of a table and for the record."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "cpu": _cpu(),
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        "memory": _memory(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **{package: _version(package) for package in ("torch", "pyzmq", "numpy")},
    }


def _cpu() -> str:
    return _line(Path("/proc/cpuinfo"), "model name") or platform.processor() or platform.machine()


def _memory() -> str:
    total = _line(Path("/proc/meminfo"), "MemTotal")
    return f"{int(total.split()[0]) / 2**20:.0f} GB" if total else "unknown"


def _line(path: Path, name: str) -> str:
    """Return the text after ``name:`` in a file of ``/proc``; empty if there is no such file."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"
