"""Runs of the modules beside this one, each in a process of its own, whose forks are the members of its jobs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]


def ran(module: str, *words: str, timeout: float) -> subprocess.CompletedProcess[str]:
    """Run ``python -m module words``; return how it has ended, and what it has said."""
    return subprocess.run(
        [sys.executable, "-m", module, *words],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])},
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )
