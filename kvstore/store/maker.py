"""For what a store is made, and where in the program: workers compare it, and messages say it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import FrameType

BY_THE_PROGRAM = "kvstore.create()"
_OURS = ("kvstore", "workers")
_maker: ContextVar[str] = ContextVar("maker", default=BY_THE_PROGRAM)


@contextmanager
def made_by(what: str) -> Iterator[None]:
    """Let the stores that are made in this block be those of ``what``, such as ``Trainer``; an inner block counts."""
    token = _maker.set(what)
    try:
        yield
    finally:
        _maker.reset(token)


def maker() -> str:
    """Return what makes stores here."""
    return _maker.get()


def place() -> str:
    """Return the line of the program that is under way, as ``train.py:12``; empty if all of it is this project's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _OURS:
            return f"{Path(frame.f_code.co_filename).name[:100]}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
