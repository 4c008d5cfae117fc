"""The memory of this job's servers on this machine, as the kernel counts it."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

MARK = "KVSTORE_JOB"
SERVER = re.compile(r"\0server-(\d+)[\0 ]*$")
FIELDS = {"VmRSS": "all", "RssAnon": "own", "RssShmem": "shared", "RssFile": "files"}


def memory_of_servers() -> list[dict[str, float]]:
    """Return each server's resident memory in MB, by rank: all, own, shared and files."""
    by_rank = {}
    for entry in Path("/proc").iterdir():
        # Processes come and go while we look, and not all are ours to look at.
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if entry.name.isdigit():
                # A server that was forked has the environment of its fork server there, but words of its own.
                named = SERVER.search((entry / "cmdline").read_text())
                if named and environment((entry / "environ").read_text()).get(MARK) == os.environ[MARK]:
                    by_rank[int(named[1])] = megabytes((entry / "status").read_text())
    return [by_rank[rank] for rank in sorted(by_rank)]


def environment(text: str) -> dict[str, str]:
    """Return the variables in the text of ``/proc/PID/environ``."""
    return dict(item.split("=", 1) for item in text.split("\0") if "=" in item)


def megabytes(status: str) -> dict[str, float]:
    """Return the memory in the text of ``/proc/PID/status``, in MB of 10**6 bytes."""
    lines = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return {name: int(lines[field].split()[0]) * 1024 / 1e6 for field, name in FIELDS.items() if field in lines}
