"""`launcher.run`: a local job whose workers call a Python function; its signals, output, and crew of workers."""

from __future__ import annotations

import errno
import inspect
import math
import multiprocessing
import os
import pickle
import reprlib
import selectors
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TextIO

from kvstore.job.processes import signal_name
from kvstore.job.settings import TASK_ID
from launcher.calls.handover import Handover, WorkerStart
from launcher.calls.outcome import Failed, Outcome, Returned, Unfinished
from launcher.errors import LaunchError, WorkerFailed
from launcher.job.command import shadows
from launcher.job.description import Job
from launcher.job.tasks import Task, outside_a_job
from launcher.kinds import local
from launcher.output.outlet import Outlet
from launcher.processes.child import Child
from launcher.processes.children import Children, Share
from launcher.processes.guard import Guard
from launcher.processes.job_run import Caller
from launcher.supervision.crew import CHILD, SignalQueue, Sink
from launcher.supervision.ending import UNNAMED
from launcher.supervision.supervisor import report

# The exit code of a worker that has called `launcher.run` while it imported the script.
UNGUARDED = 78
_UNGUARDED = (
    "launcher.run was called while a worker imported the script, which each worker does to find the function; "
    'put the call, and all else that only the script itself must do, under `if __name__ == "__main__":`'
)


TIME_LIMIT = int(signal.SIGALRM)


class SpawnedCrew(Children):
    """Runs tasks on this machine; see `Crew`. It notices exits without SIGCHLD, which only the main thread can handle.

    Args:
        handover: the call, which workers make instead of executing their tasks.
        tasks, guard, pass_fds, shares: see `Children`.
    """

    def __init__(
        self,
        handover: Handover,
        tasks: Mapping[int, Task],
        guard: Guard,
        *,
        pass_fds: Mapping[int, tuple[int, ...]] | None = None,
        shares: Mapping[int, Share] | None = None,
    ) -> None:
        starts = {index: handover.starts[task.rank] for index, task in tasks.items() if task.role == "worker"}
        fds = dict(pass_fds or {})
        fds.update((index, start.pass_fds) for index, start in starts.items())
        tasks = {
            index: replace(task, argv=starts[index].argv) if index in starts else task for index, task in tasks.items()
        }
        super().__init__(tasks, guard, pass_fds=fds, shares=shares)
        self._handover = handover
        self._fed: list[int] = []
        self._ends: list[int] = []

    def start(self, selector: selectors.BaseSelector, sink: Sink) -> None:
        """Start them in order, and hand the call to the workers."""
        super().start(selector, sink)
        self._handover.started()
        for start in self._handover.starts:
            # Not blocking: a pipe takes 64 KiB, and a worker may never read.
            os.set_blocking(start.writer, False)
            selector.register(start.writer, selectors.EVENT_WRITE, partial(self._feed, start))
            self._fed.append(start.writer)

    def _exists(self, child: Child) -> None:
        super()._exists(child)
        self._await(child.pid)

    def close(self) -> None:
        """Kill what is left."""
        super().close()
        for fd in [*self._fed, *self._ends]:
            self._selector.unregister(fd)
        for fd in self._ends:
            os.close(fd)
        self._fed, self._ends = [], []

    def _feed(self, start: WorkerStart) -> None:
        try:
            start.data = start.data[os.write(start.writer, start.data) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            start.data = b""
        if not start.data:
            self._selector.unregister(start.writer)
            self._fed.remove(start.writer)

    def _await(self, pid: int) -> None:
        if hasattr(os, "pidfd_open"):
            try:
                fd = os.pidfd_open(pid)
            except OSError:  # an old kernel: the supervisor checks regularly
                return
            self._ends.append(fd)
            self._selector.register(fd, selectors.EVENT_READ, partial(self._ended, fd))

    def _ended(self, fd: int) -> None:
        self._selector.unregister(fd)
        self._ends.remove(fd)
        os.close(fd)
        self.collect()


class Streams(Outlet):
    """An outlet to `sys.stdout` and `sys.stderr`.

    It writes to the descriptors 1 and 2 if these are the streams of the process. A stream that has been replaced has a
    negative number here, and is written to at once.
    """

    def __init__(self) -> None:
        self._replaced: dict[int, TextIO | None] = {}
        numbers = []
        streams: tuple[tuple[int, TextIO | None, object], ...] = (
            (1, sys.stdout, sys.__stdout__),
            (2, sys.stderr, sys.__stderr__),
        )
        for number, stream, original in streams:
            if stream is not None and stream is original:
                with suppress(OSError, ValueError):
                    stream.flush()  # the caller's output comes before the job's
                numbers.append(number)
            else:
                self._replaced[-number] = stream
                numbers.append(-number)
        super().__init__(*numbers)
        self._unflushed: set[int] = set()

    def put(self, fd: int, lines: bytes) -> None:
        """Queue whole lines, or write them to a stream."""
        if fd not in self._replaced:
            super().put(fd, lines)
            return
        stream = self._replaced[fd]
        if not lines or stream is None or fd in self.broken:
            return
        try:
            stream.write(lines.decode(errors="replace"))
            self._unflushed.add(fd)
        except Exception as error:  # the replacement may raise anything
            self.broken[fd] = OSError(errno.EIO, str(error))

    def pump(self) -> None:
        """Write what can be written now."""
        for fd in self._unflushed:
            flush = getattr(self._replaced[fd], "flush", None)
            try:
                if flush is not None:
                    flush()
            except Exception as error:
                self.broken[fd] = OSError(errno.EIO, str(error))
        self._unflushed.clear()
        super().pump()


class Interrupts(SignalQueue):
    """Signals, in the main thread, which alone can have handlers; and a time limit, which comes as a signal does.

    Args:
        timeout: the limit in seconds; None for no limit.
    """

    def __init__(self, timeout: float | None) -> None:
        super().__init__()
        self.first: int | None = None
        self._main = threading.current_thread() is threading.main_thread()
        self._timer = None if timeout is None else threading.Timer(timeout, self._expire)

    def take(self) -> list[int]:
        """The signals since the last call, in order. Outside the main thread they always include CHILD."""
        received = super().take()
        if self.first is None:
            self.first = next((signum for signum in received if signum != CHILD), None)
        return received if self._main else [*received, CHILD]

    def __enter__(self) -> Interrupts:
        if self._main:
            super().__enter__()
        else:
            self._read.setblocking(False)
            self._write.setblocking(False)
        if self._timer is not None:
            self._timer.daemon = True
            self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()
        if self._main:
            super().__exit__()
        else:
            self._read.close()
            self._write.close()

    def _expire(self) -> None:
        with suppress(BlockingIOError):
            self._write.send(bytes([TIME_LIMIT]))


def run(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    num_workers: int = 1,
    num_servers: int | None = None,
    env: Mapping[str, str] | None = None,
    env_server: Mapping[str, str] | None = None,
    timeout: float | None = None,
) -> list[Any]:
    """Call a function in each worker of a new job on this machine, and wait for the end of the job.

    In the function, `kvstore.create("dist_sync")` makes a store of that job. Workers are processes of multiprocessing,
    by its spawn method. They import the function from its module, or from the script, which then has to call
    `launcher.run` under `if __name__ == "__main__":`. A notebook cannot be imported: its functions and classes, and
    the functions, classes and values that they use, are copied.

    The workers' output goes to `sys.stdout` and `sys.stderr`, with the name of the process before each line. When this
    returns or raises, no process of the job is left.

    Args:
        function: the function to call.
        args: its positional arguments. Each worker gets a copy of them.
        kwargs: its keyword arguments, likewise.
        num_workers: the number of workers.
        num_servers: the number of servers; None for as many as workers.
        env: environment variables for the workers, beside those of this process.
        env_server: environment variables for the servers, likewise.
        timeout: the time limit for the job, in seconds; None for no limit.

    Returns:
        The results of the workers, in the order of their ranks; None for a worker that has called `sys.exit(0)`.

    Raises:
        LaunchError: the job cannot be started, the script lacks the guard, or the function uses what cannot be given to
            workers.
        WorkerFailed: a worker, a server or the scheduler has died; or a worker has raised or returned an object that
            cannot be pickled.
        Exception: the exception that a worker has raised. Its cause is a `WorkerFailed` with the worker and the
            traceback.
        TimeoutError: the job has taken longer than `timeout`.
        KeyboardInterrupt: the user has interrupted this process.
        BrokenPipeError: standard output has no reader any more.
    """
    _check_call(function, args, kwargs)
    for variables in (env or {}, env_server or {}):
        for name, value in variables.items():
            if not isinstance(name, str) or not isinstance(value, str):
                raise TypeError(f"variables must be strings, but {name!r} is set to a {type(value).__name__}")
    _check_guard()
    for shadow in shadows(sys.path):
        print(f"launcher.run: warning: {shadow}", file=sys.stderr)
    job = Job(
        num_workers=num_workers,
        num_servers=num_workers if num_servers is None else num_servers,
        command=(
            "python",
            repr(function),
        ),  # only for the check that the interpreter exists; the crew executes other words
        env_server=env_server or {},
        env_worker=env or {},
    )
    try:
        handover = Handover(function, args, kwargs or {}, num_workers)
    except LaunchError as error:
        raise error.with_traceback(None) from None  # a notebook shows every frame, and these are not the user's
    try:
        return _run(job, handover, timeout)
    finally:
        handover.close()


def _check_call(function: object, args: object, kwargs: object) -> None:
    """Refuse what would be taken for a list of arguments: a string would give one argument for each character."""
    if not callable(function):
        raise TypeError(f"run() needs a function, got {function!r}; pass its arguments as args and kwargs")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(f"{function!r} is a generator, whose values cannot come back one by one; return a list of them")
    if inspect.iscoroutinefunction(function):
        raise TypeError(f"{function!r} is a coroutine function; pass one that calls asyncio.run on it")
    if isinstance(args, Mapping):
        raise TypeError(
            f"args must be a list or tuple, got {reprlib.repr(args)}; for arguments by name, pass it as kwargs"
        )
    if isinstance(args, (str, bytes, bytearray)) or not isinstance(args, Sequence):
        shown = reprlib.repr(args)
        raise TypeError(f"args must be a list or tuple of arguments, got {shown}; for one argument: args=({shown},)")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        shown = reprlib.repr(kwargs)
        raise TypeError(f"kwargs must be a dict of arguments by name, got {shown}; for others, pass args")


def _check_guard() -> None:
    process = multiprocessing.current_process()
    if not getattr(process, "_inheriting", False):
        return
    if process.name == f"worker {os.environ.get(TASK_ID.name)}":
        sys.exit(UNGUARDED)  # the caller reports it, once
    raise LaunchError(_UNGUARDED)


def _run(job: Job, handover: Handover, timeout: float | None) -> list[Any]:
    failures: list[tuple[Task, str]] = []

    def on_failure(task: Task, how: str) -> None:
        failures.append((task, how))
        report(task, how)

    interrupts = Interrupts(timeout)
    caller = Caller(
        "launcher.run", interrupts, Streams(), partial(SpawnedCrew, handover), says_start=False, gives_input=False
    )
    code = local.run(job, on_failure, environ=outside_a_job(os.environ), caller=caller)
    if interrupts.first not in (None, TIME_LIMIT):
        signal.raise_signal(interrupts.first)  # for the caller's handler, now that no job runs; most handlers raise
        raise WorkerFailed("the job", f"was ended by {signal_name(interrupts.first)}")
    outcomes = [_outcome(handover, rank) for rank in range(job.num_workers)]
    if failures:
        task, how = failures[0]
        outcome = outcomes[task.rank] if task.role == "worker" else None
        if code == UNGUARDED and outcome == Unfinished(begun=False):
            raise LaunchError(_UNGUARDED)
        if isinstance(outcome, Failed) or how == UNNAMED:
            _raise_first(outcomes)
        late = f" before it could call {handover.name}; its output may say why" if outcome == Unfinished(False) else ""
        raise WorkerFailed(task.name, how + late)
    results = [outcome.value for outcome in outcomes if isinstance(outcome, Returned)]
    if len(results) == job.num_workers:
        return results
    if interrupts.first == TIME_LIMIT:
        raise TimeoutError(f"the job took longer than {timeout:g} s, and was ended")
    if code == 128 + signal.SIGPIPE:
        raise BrokenPipeError(errno.EPIPE, "standard output has no reader any more")
    _raise_first(outcomes)
    silent = next(rank for rank, outcome in enumerate(outcomes) if isinstance(outcome, Unfinished))
    raise WorkerFailed(f"worker {silent}", f"exited with code 0 before {handover.name} returned")


def _outcome(handover: Handover, rank: int) -> Outcome:
    try:
        return handover.outcome(rank)
    except Exception as error:
        return Failed(math.inf, f"returned what cannot be loaded here: {type(error).__name__}: {error}", "", None)


def _raise_first(outcomes: Sequence[Outcome]) -> None:
    """Raise the first exception that a worker has raised, if any. The order of the exits may differ."""
    failed = sorted(
        (outcome.when, rank, outcome) for rank, outcome in enumerate(outcomes) if isinstance(outcome, Failed)
    )
    if not failed:
        return
    (_, rank, first), *others = failed
    later = "".join(f"\nThen worker {rank} {outcome.how}" for _, rank, outcome in others)
    cause = WorkerFailed(f"worker {rank}", first.how, first.details.rstrip() + later)
    if first.error is None:
        raise cause
    try:
        error = pickle.loads(first.error)  # noqa: S301 (from our own child, through memory that only it has)
    except Exception:
        raise cause from None
    raise error from cause
