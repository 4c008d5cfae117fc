"""An exception at one line after another of a call, over each kind of links; see ``interrupts``."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from interrupting import interrupted
from threaded import ThreadedJob
from waiting import LONG

KINDS = ("unix", "tcp", "curve", "shm")
STEP = int(os.environ.get("KVSTORE_TESTS_LINES", "112"))  # 1 interrupts at every line, which takes 20 minutes
TABLE_STEP = STEP if STEP == 1 else 3 * STEP + 1  # their calls have many lines
LIMIT_S = LONG + 10.0 + 600.0 / STEP  # for one test

# Python cannot raise out of a destructor, nor out of what a weak reference calls: it says so, and goes on. And what has
# been made, and is not in any variable yet, is closed by a destructor.
MARKS = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.timeout(LIMIT_S + 60.0),
]


def same(tensor: torch.Tensor, value: float) -> bool:
    return bool((tensor == value).all())


def sweep(
    job: ThreadedJob,
    call: Callable[[int], Any],
    after: Callable[[int], Any],
    error: type[BaseException],
    step: int = STEP,
) -> int:
    """Interrupt ``call`` at one line after another, until it ends before; return how many there were.

    Of every ``step`` lines it takes one, and another one with each kind of links.
    """
    line = KINDS.index(job.kind) * step // len(KINDS)
    while interrupted(partial(call, line), line, error):
        after(line)
        line += step
    after(line)
    return line
