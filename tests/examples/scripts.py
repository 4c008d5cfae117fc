"""Scripts as processes of their own, and what their workers print."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def start(*command: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a Python script to its end; returns the process, with all that it wrote as its standard output."""
    return run([sys.executable, *map(str, command)], cwd)


def environment() -> dict[str, str]:
    """The environment of a script."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def run(words: Sequence[str], cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; see ``start``."""
    return subprocess.run(
        words, cwd=cwd, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def launch(script: str, workers: int, servers: int, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run an example and its options as a job of launch.py on this machine; see ``start``."""
    return run(launching(script, workers, servers), cwd)


def launching(script: str, workers: int, servers: int) -> list[str]:
    """The words that ``launch`` runs."""
    sizes = ("-n", str(workers), "-s", str(servers), "--launcher", "local")
    return [sys.executable, str(ROOT / "launcher" / "launch.py"), *sizes, f"python {EXAMPLES / script}"]


def lines_of(process: subprocess.CompletedProcess[str], rank: int) -> list[str]:
    """What worker ``rank`` has printed."""
    return re.findall(rf"^\[worker {rank}\] (.*)$", process.stdout, re.MULTILINE)
