"""What the real things need of a machine. Where it is lacking, tests skip and say so; see ``required.py`` for CI."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess

import pytest

# Programs that Debian keeps where not everybody looks.
PLACES = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


def find(program: str) -> str | None:
    """The path of a program, also of one that only root has on its PATH."""
    return shutil.which(program, path=PLACES)


def missing(*programs: str) -> str:
    """Why none of this can run here; empty if it can."""
    if os.geteuid() != 0:
        return "hosts are made of namespaces, which need root"
    if not _may():
        return (
            "hosts are made of namespaces, which this machine does not let root make (a container without privileges?)"
        )
    lacking = [program for program in programs if find(program) is None]
    return f"not installed: {', '.join(lacking)} (.ci/run installs it)" if lacking else ""


@functools.cache
def _may() -> bool:
    if (unshare := find("unshare")) is None:
        return True  # that is told otherwise
    asked = [unshare, "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--mount-proc", "true"]
    return subprocess.run(asked, capture_output=True, check=False).returncode == 0


def need(*programs: str) -> None:
    """Skip the test that asks, unless it can run here."""
    if reason := missing(*programs):
        pytest.skip(reason)
