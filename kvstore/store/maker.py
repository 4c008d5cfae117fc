"""For what a store is made, and where in the program: workers compare it, and messages say it.

Readers find stores by name. The stores that a program makes, or has Trainers make, are counted: "1", "2", and so on.
Stores that this project makes for itself take no number, so that none of them shifts the program's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import FrameType

BY_THE_PROGRAM = "kvstore.create()"
COUNTED = "#"  # stands for the next number
GROUP = "workers"  # the store of workers.init()
UNNAMED = ""  # of no interest to readers: it has nothing but sums
_OURS = ("kvstore", "workers")
_maker: ContextVar[tuple[str, str]] = ContextVar("maker", default=(BY_THE_PROGRAM, COUNTED))


@contextmanager
def made_by(what: str, name: str = COUNTED) -> Iterator[None]:
    """Let the stores that are made in this block be those of ``what``, such as ``Trainer``; an inner block counts."""
    token = _maker.set((what, name))
    try:
        yield
    finally:
        _maker.reset(token)


def maker() -> str:
    return _maker.get()[0]


def name(before: Iterable[str]) -> str:
    """Return the name of a store that is made here, after stores with the names ``before``."""
    given = _maker.get()[1]
    return str(1 + sum(each.isdecimal() for each in before)) if given == COUNTED else given


def place() -> str:
    """Return the line of the program that is under way, as ``train.py:12``; empty if all of it is this project's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _OURS:
            return f"{Path(frame.f_code.co_filename).name[:100]}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
