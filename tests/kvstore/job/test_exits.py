"""How a process has ended, in words and as an exit code."""

from __future__ import annotations

import pytest

from kvstore.job.exits import Exit


@pytest.mark.parametrize(
    ("how", "text", "status"),
    [
        (Exit(), "exited with code 0", 0),
        (Exit(code=7), "exited with code 7", 7),
        (Exit(code=137), "exited with code 137 (128 + SIGKILL)", 137),
        (Exit(code=255), "exited with code 255", 255),
        (Exit(signum=9), "was killed by SIGKILL", 137),
        (Exit(signum=42), "was killed by signal 42", 170),
    ],
)
def test_how_it_is_said(how: Exit, text: str, status: int) -> None:
    assert (str(how), how.status) == (text, status)


@pytest.mark.parametrize(("returncode", "how"), [(0, Exit()), (7, Exit(code=7)), (-9, Exit(signum=9))])
def test_how_a_child_ended(returncode: int, how: Exit) -> None:
    assert Exit.of(returncode) == how
