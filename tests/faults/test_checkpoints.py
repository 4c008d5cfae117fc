"""A few of the kills that ``make faults`` makes by the hundred, and a full disk: no checkpoint is ever torn."""

from __future__ import annotations

import os

import pytest
from waiting import LONG

from faults.running import ran


@pytest.mark.long
@pytest.mark.parametrize(
    "words", [("6",), pytest.param(("4", "--full"), marks=pytest.mark.release)], ids=["killed", "full"]
)
def test_the_newest_checkpoint_is_whole(words: tuple[str, ...]) -> None:
    if "--full" in words and os.geteuid() != 0:
        pytest.skip("a disk that is full needs a mount, and that needs root")
    done = ran("faults.checkpoints", *words, timeout=LONG)
    if "mount" in done.stderr and "permission denied" in done.stderr:
        pytest.skip("this container may not mount")
    assert done.returncode == 0, done.stdout + done.stderr
