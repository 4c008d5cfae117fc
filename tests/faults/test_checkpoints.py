"""A few of the kills that ``make faults`` makes by the hundred, and a full disk: no checkpoint is ever torn."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import LONG

TESTS = Path(__file__).parents[1]


@pytest.mark.long
@pytest.mark.parametrize("words", [("6",), ("4", "--full")], ids=["killed", "full"])
def test_the_newest_checkpoint_is_whole(words: tuple[str, ...]) -> None:
    if "--full" in words and os.geteuid() != 0:
        pytest.skip("a disk that is full needs a mount, and that needs root")
    done = subprocess.run(
        [sys.executable, "-m", "faults.checkpoints", *words],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])},
        capture_output=True,
        text=True,
        check=False,
        timeout=LONG,
    )
    if "mount" in done.stderr and "permission denied" in done.stderr:
        pytest.skip("this container may not mount")
    assert done.returncode == 0, done.stdout + done.stderr
