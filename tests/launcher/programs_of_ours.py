"""Runs our programs in a directory where things are called as ours are."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from waiting import LONG


def run(argv: list[str], directory: Path, **environ: str) -> tuple[int, bytes, str]:
    """How it ends, and what it prints."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | environ
    done = subprocess.run(argv, cwd=directory, env=env, capture_output=True, input=b"", timeout=LONG, check=False)
    return done.returncode, done.stdout, done.stderr.decode()
