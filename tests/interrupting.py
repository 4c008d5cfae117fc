"""Exceptions in the middle of a call, as the handlers of signals raise them: at any line, whoever's code it is in."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


class Interrupt(BaseException):
    """What the handler of a signal raises."""


def interrupted(action: Callable[[], Any], line: int, error: type[BaseException] = Interrupt) -> bool:
    """Call ``action`` and raise ``error`` at its line number ``line``, counted as they run.

    Lines of the standard library and of other packages count too. Return whether there were so many.
    """
    came = False
    lines = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines, came
        if event == "line":
            lines += 1
            if lines > line and not came:
                came = True
                sys.settrace(None)
                raise error(f"at {frame.f_code.co_filename}:{frame.f_lineno}")
        return trace

    # The collector calls finalizers of anybody's garbage in the middle of anything; Python only prints what they raise.
    collects, before = gc.isenabled(), sys.gettrace()
    gc.disable()
    sys.settrace(trace)
    try:
        action()
    except error:
        if not came:
            raise
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
    return came
