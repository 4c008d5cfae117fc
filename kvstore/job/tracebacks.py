"""Tracebacks for users: their own lines, without the frames of this project where these say nothing.

An exception that nobody catches is told to the process's supervisor, or printed. Only the first process to fail has
something to say. The others end with ``NodeLost``, and a line is enough for each.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from kvstore.errors import KVStoreError, NodeLost
from kvstore.job.exit_report import ExitReport, ReportFile, hand_over, is_verbose

_ROOT = str(Path(__file__).resolve().parents[2])
_OURS = tuple(f"{_ROOT}{os.sep}{name}{os.sep}" for name in ("kvstore", "workers", "launcher", "servers"))
_LIBRARIES = tuple(
    f"{path}{os.sep}"
    for path in {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    if path
)
_INSTALLED = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))  # also of another prefix
_HEADER = "Traceback (most recent call last):\n"


def shortened(error: BaseException, show_all: str = "--verbose shows all") -> str:
    """The traceback of an error, as Python prints it, without frames that do not help.

    An error that this project raises on purpose is about the user's call, so the traceback ends there. In other
    tracebacks, our frames are left out between the user's. If the last frame is ours, all are kept: that is a defect of
    ours, or an argument that we have not checked.
    """
    printed = traceback.TracebackException.from_exception(error)
    left_out = _shorten(error, printed, set())
    text = "".join(printed.format())
    before, header, after = text.rpartition(_HEADER)
    if not left_out or not header:
        return text
    frames = "1 frame of the library is" if left_out == 1 else f"{left_out} frames of the library are"
    return f"{before}{header[:-3]}; {frames} left out, {show_all}):\n{after}"


def described(error: BaseException) -> str:
    """As the last line of its traceback: ``ValueError: no data``."""
    return "".join(traceback.format_exception_only(error)).strip()


def place(error: BaseException) -> str:
    """The innermost line of the user's own code, as ``train.py:13, in step``; empty if there is none."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    if not frames:
        return ""
    where = f"{_short(frames[-1].filename)}:{frames[-1].lineno}"
    return where if frames[-1].name == "<module>" else f"{where}, in {frames[-1].name}"


def chain(error: BaseException) -> Iterator[BaseException]:
    """An error, its causes, and what they were raised in the course of."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            yield one
            waiting += [one.__context__, one.__cause__, *getattr(one, "exceptions", ())]


def _shorten(error: BaseException, printed: traceback.TracebackException, seen: set[int]) -> int:
    """Remove frames from a traceback, its cause and its context; return how many."""
    seen.add(id(error))
    frames = list(printed.stack)
    kept = _kept(frames, on_purpose=isinstance(error, KVStoreError))
    printed.stack[:] = [*map(_without_underline, kept[:-1]), *kept[-1:]]
    count = len(frames) - len(kept)
    if isinstance(error, KVStoreError) and printed.__context__ is not None and not _users_frames(printed.__context__):
        printed.__context__ = None  # how the library noticed: a KeyError of ours explains nothing
    others = [(error.__cause__, printed.__cause__), (error.__context__, printed.__context__)]
    others += zip(getattr(error, "exceptions", ()), getattr(printed, "exceptions", None) or (), strict=False)
    for other, its_print in others:
        if other is not None and its_print is not None and id(other) not in seen:
            count += _shorten(other, its_print, seen)
    return count


def _kept(frames: list[traceback.FrameSummary], on_purpose: bool) -> list[traceback.FrameSummary]:
    users = [number for number, frame in enumerate(frames) if _is_users(frame.filename)]
    if on_purpose and users:
        frames = frames[: users[-1] + 1]
    elif not frames or frames[-1].filename.startswith(_OURS):
        return frames
    return [frame for frame in frames if not frame.filename.startswith(_OURS)]


def _without_underline(frame: traceback.FrameSummary) -> traceback.FrameSummary:
    """The frame without the marks under a part of its line: the marks of the last frame are enough."""
    return traceback.FrameSummary(frame.filename, frame.lineno, frame.name, line=frame.line)


def _users_frames(printed: traceback.TracebackException) -> bool:
    return any(_is_users(frame.filename) for frame in printed.stack)


def _is_users(filename: str) -> bool:
    return not filename.startswith((*_OURS, *_LIBRARIES, "<frozen")) and not any(
        part in filename for part in _INSTALLED
    )


def _short(filename: str) -> str:
    try:
        relative = os.path.relpath(filename)
    except (ValueError, OSError):
        return filename
    return filename if relative.startswith("..") else relative


_pid = -1


def install_excepthook() -> None:
    """Take over ``sys.excepthook`` in this process, unless the user has set one. May be called again."""
    global _pid
    if sys.excepthook in (sys.__excepthook__, report_uncaught):
        sys.excepthook, _pid = report_uncaught, os.getpid()


def report_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Report an exception that ends this process; see ``sys.excepthook``."""
    try:
        done = os.getpid() == _pid and _report(error)  # a fork is no member of the job, and prints
    except Exception:  # whatever it is, the error itself must be seen
        done = False
    if not done:
        sys.__excepthook__(kind, error, trace)


def reported(error: BaseException) -> ExitReport:
    losses = [one for one in chain(error) if isinstance(one, NodeLost)]
    cause = next((loss.cause for loss in losses if loss.cause), "")
    return ExitReport(described(error), place(error), shortened(error), bool(losses), cause=cause)


def _report(error: BaseException) -> bool:
    """Tell the supervisor, or print one line; return whether that was enough."""
    report = reported(error)
    consequence, where = report.consequence, report.place
    if hand_over(report, os.environ):
        return True
    # Ctrl-C is for all workers at once, and each is somewhere inside a call of ours: frames help nobody.
    short = consequence or isinstance(error, KeyboardInterrupt)
    if short and not is_verbose(os.environ) and ReportFile.from_env(os.environ) is None:
        line = described(error) + (f" (at {where})" if where else "")
        print(f"{line}\n", end="", file=sys.stderr, flush=True)  # one write: other processes print at the same time
        return True
    return False
