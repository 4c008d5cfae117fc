"""Scripts as processes of their own, and what their workers print."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def start(*command: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a Python script to its end; returns the process, with all that it wrote as its standard output."""
    return subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def launch(script: str, workers: int, servers: int, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run an example and its options as a job of launch.py on this machine; see ``start``."""
    command = f"python {EXAMPLES / script}"
    sizes = ("-n", workers, "-s", servers, "--launcher", "local")
    return start(ROOT / "launcher" / "launch.py", *sizes, command, cwd=cwd)


def lines_of(process: subprocess.CompletedProcess[str], rank: int) -> list[str]:
    """What worker ``rank`` has printed."""
    return re.findall(rf"^\[worker {rank}\] (.*)$", process.stdout, re.MULTILINE)
