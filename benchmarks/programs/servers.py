"""The memory of this job's servers on this machine, as the kernel counts it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

MARK = "KVSTORE_JOB"
FIELDS = {"VmRSS": "all", "RssAnon": "own", "RssShmem": "shared", "RssFile": "files"}


def memory_of_servers() -> list[dict[str, float]]:
    """Return each server's resident memory in MB, by rank: all, own, shared and files."""
    by_rank = {}
    for entry in Path("/proc").iterdir():
        # Processes come and go while we look, and not all are ours to look at.
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if entry.name.isdigit():
                env = environment((entry / "environ").read_text())
                if env.get("DMLC_ROLE") == "server" and env.get(MARK, "") == os.environ[MARK]:
                    by_rank[int(env["DMLC_TASK_ID"])] = megabytes((entry / "status").read_text())
    return [by_rank[rank] for rank in sorted(by_rank)]


def environment(text: str) -> dict[str, str]:
    """Return the variables in the text of ``/proc/PID/environ``."""
    return dict(item.split("=", 1) for item in text.split("\0") if "=" in item)


def megabytes(status: str) -> dict[str, float]:
    """Return the memory in the text of ``/proc/PID/status``, in MB of 10**6 bytes."""
    lines = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return {name: int(lines[field].split()[0]) * 1024 / 1e6 for field, name in FIELDS.items() if field in lines}
