"""What an action costs, in numbers that no load of the machine changes."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType
from typing import Any


def steps(action: Callable[[], Any]) -> int:
    """How many lines ``action`` runs, with calls and returns; a line once for each turn of a loop in it."""
    count = 0

    def trace(_frame: FrameType, _event: str, _: Any) -> Any:
        nonlocal count
        count += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return count


def peak(action: Callable[[], Any]) -> int:
    """How many bytes ``action`` needs for a moment: it shows a set or a list that Python makes in one step."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        action()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def same(few: float, many: float) -> bool:
    """Whether the cost for each of a few and for each of many is the same."""
    return 0 < many <= few * 1.05
