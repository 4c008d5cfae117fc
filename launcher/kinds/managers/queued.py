"""Follows a job that a cluster manager has queued: its output, its exit code, its cancellation."""

from __future__ import annotations

import os
import select
import selectors
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvstore.rare_log import worth_a_line
from launcher.errors import LaunchError
from launcher.kinds.managers.programs import tell
from launcher.processes.last_will import LastWill
from launcher.supervision.signals import CHILD, SignalQueue, called

STEP_S = 0.2
_ASK_S = 0.5
NOTICE_S = 30.0
GRACE_S = 8.0  # for launch.py inside the allocation to end the job
CANCEL_S = 10.0
_CHUNK = 1 << 20
_TAKEN = 4096  # bytes that a writable pipe takes without blocking


@dataclass(frozen=True)
class QueueState:
    """The state of a job.

    Args:
        text: the state in the manager's words.
        running: whether it has left the queue.
        over: whether it has ended.
        status: its exit code, once it is over.
    """

    text: str
    running: bool
    over: bool
    status: int


@dataclass(frozen=True)
class QueuedJob:
    """A submitted job.

    Args:
        title: its name in messages.
        state: asks the manager. It may raise LaunchError if the manager does not answer.
        interrupt: sends a signal to the job's first process.
        cancel: the command that ends the job, whatever its state.
        stdout, stderr: the files that its output goes to.
        others: other files to remove at the end.
    """

    title: str
    state: Callable[[], QueueState]
    interrupt: Callable[[int], None]
    cancel: tuple[str, ...]
    stdout: Path
    stderr: Path
    others: tuple[Path, ...] = ()


class _Tail:
    """A file that another process appends to, and that may not exist yet."""

    def __init__(self, path: Path, target: int) -> None:
        self._path, self._target, self._at = path, target, 0
        self._rest = b""

    def pump(self) -> bool:
        """Write what is new, as much as can be written without blocking, so that signals are still noticed.

        Returns:
            Whether all of it was written.
        """
        while self._rest or self._next():
            if not select.select([], [self._target], [], 0)[1]:
                return False
            self._rest = self._rest[os.write(self._target, self._rest[:_TAKEN]) :]
        return True

    def _next(self) -> bool:
        self._rest = self._read()
        self._at += len(self._rest)
        return bool(self._rest)

    def _read(self) -> bytes:
        with suppress(OSError), self._path.open("rb") as file:  # a network file system may fail for a moment
            file.seek(self._at)
            return file.read(_CHUNK)
        return b""


def follow(submit: Callable[[], QueuedJob], *, ask_s: float = _ASK_S) -> int:
    """Submit a job, print its output, and wait for its end. Cancel it if this process gets a signal, or is killed.

    Returns:
        Its exit code, or 128 + the signal.

    Raises:
        LaunchError: it cannot be submitted.
    """
    with SignalQueue() as signals, selectors.DefaultSelector() as selector:
        selector.register(signals, selectors.EVENT_READ)
        job = submit()
        files = [job.stdout, job.stderr, *job.others]
        will = LastWill(job.cancel, files)
        try:
            return _follow(job, [_Tail(job.stdout, 1), _Tail(job.stderr, 2)], signals, selector, ask_s)
        except BaseException:
            tell(job.cancel, CANCEL_S)  # nothing follows it any more
            raise
        finally:
            will.revoke()
            for path in files:
                with suppress(OSError):
                    path.unlink()


def _follow(
    job: QueuedJob, tails: list[_Tail], signals: SignalQueue, selector: selectors.BaseSelector, ask_s: float
) -> int:
    print(f"launch.py: {job.title} was submitted", file=sys.stderr)
    asked = noticed = time.monotonic()
    state = QueueState("", running=False, over=False, status=0)
    failures = 0
    ended: int | None = None
    deadline = 0.0
    canceled = False
    broken: list[int] = []
    while True:
        selector.select(STEP_S)
        now = time.monotonic()
        received, broken = [*signals.take(), *broken], []
        for signum in received:
            if signum == CHILD:
                continue
            if ended is None:
                ended, deadline = 128 + signum, now + (GRACE_S if state.running else 0.0)
                if state.running:
                    job.interrupt(signum)
            else:
                deadline = now  # a second signal: cancel at once
        if ended is not None and now >= deadline:
            if canceled:
                print(f"launch.py: gave up waiting for {job.title} to end; it was canceled", file=sys.stderr)
                return ended
            canceled, deadline = True, now + CANCEL_S
            tell(job.cancel, CANCEL_S)
        if now >= asked + ask_s:
            asked = now
            try:
                state, failures = job.state(), 0
            except LaunchError as error:
                failures += 1
                if worth_a_line(failures):  # the manager may restart while a job runs
                    print(f"launch.py: {error}", file=sys.stderr)
            if not state.running and not state.over and now >= noticed + NOTICE_S:
                noticed = now
                print(f"launch.py: {job.title} is waiting: {state.text}", file=sys.stderr)
        try:
            for tail in tails:
                tail.pump()
        except BrokenPipeError:  # no reader any more (`| head`): end as by SIGPIPE
            tails, broken = [], [signal.SIGPIPE]
        if state.over:
            # The last output may arrive later than the state, over a network file system.
            time.sleep(STEP_S)
            with suppress(BrokenPipeError):
                while not all([tail.pump() for tail in tails]) and not signals.take():  # noqa: C419 (each must go on)
                    selector.select(STEP_S)
            if canceled and ended is not None:  # else the launch.py in the job says what it has ended
                print(f"launch.py: {called(ended - 128)}: {job.title} was canceled, and has ended", file=sys.stderr)
            if ended is None and state.status:
                print(f"launch.py: {job.title} ended: {state.text}, exit code {state.status}", file=sys.stderr)
            return state.status if ended is None else ended
