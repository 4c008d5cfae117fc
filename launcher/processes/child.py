"""One child process, its two pipes, and how it ended."""

from __future__ import annotations

import difflib
import os
import selectors
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvstore.job.exit_report import ExitReport, ReportFile
from kvstore.job.forking import Forked, ForkServer
from kvstore.job.processes import Exit, TiedProcess
from launcher.errors import CANNOT_EXECUTE, NOT_FOUND, LaunchError
from launcher.job.command import PYTHONS
from launcher.job.tasks import Task

_READ = 1 << 16
_PIPE_HOLDS = 1 << 20  # at most, by the default limit of Linux


@dataclass(frozen=True)
class Program:
    """What a child executes, if it is no task."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str] = field(repr=False)


class OutputPipe:
    """Reads an output of a child without blocking. `on_data` gets what comes, and empty data once, at the end."""

    def __init__(self, source: int, on_data: Callable[[bytes], None]) -> None:
        self._source, self._on_data = source, on_data
        self._selector: selectors.BaseSelector | None = None
        self._closed = False

    def register(self, selector: selectors.BaseSelector) -> None:
        if not self._closed and self._selector is None:
            self._selector = selector
            selector.register(self._source, selectors.EVENT_READ, self.read)

    def unregister(self) -> None:
        """Leave the output in the pipe, so that the child waits when it is full."""
        if self._selector is not None:
            self._selector.unregister(self._source)
            self._selector = None

    def read(self) -> int:
        """Read once. Returns the number of bytes; 0 if there are none now, and at the end."""
        if self._closed:  # by what came just before, and the selector had it on its list
            return 0
        try:
            data = os.read(self._source, _READ)
        except BlockingIOError:
            return 0
        if data:
            self._on_data(data)
        else:
            self.finish()
        return len(data)

    def drain(self) -> None:
        """Read what was in the pipe when the child exited; no more, because a grandchild may write for ever."""
        total = 0
        while total <= _PIPE_HOLDS and (count := self.read()):
            total += count

    def finish(self) -> None:
        if not self._closed:
            self._closed = True
            self.unregister()
            os.close(self._source)
            self._on_data(b"")


class Child:
    """A child process that leads a session of its own.

    The process exists from construction on, and executes its program at `execute`. If a fork server makes it, it exists
    some time after `execute`, from `begin` on.

    It is reaped at `reap`, not when it exits. Until then no other process can get its pid, which is also the number of
    its process group and of its session.

    Args:
        keeper_fd: the keeper's pipe, to which the process writes its pid before it executes the program; -1 for none.
        pass_fds: the file descriptors that it inherits beside its standard streams.
        stdin: its standard input; None for /dev/null.
        attached: whether it has this process's standard streams, instead of `stdin` and pipes.
        report: the file in which the program may say why it ends; None for none.
        forked: whether a fork server makes it. It inherits neither `stdin` nor `pass_fds` then.
    """

    def __init__(
        self,
        task: Task | Program,
        keeper_fd: int = -1,
        pass_fds: tuple[int, ...] = (),
        *,
        stdin: int | None = None,
        attached: bool = False,
        report: Path | None = None,
        forked: bool = False,
    ) -> None:
        self.task = task
        self.exit: Exit | None = None
        # No terminal between: line editing, colors and progress bars are as if the program had been started by hand.
        out, err = ((-1, 1), (-1, 2)) if attached else (os.pipe(), os.pipe())
        self.ends: Sequence[int] = (
            () if attached else (out[1], err[1])
        )  # of its pipes, which are closed here once it exists
        self.stdout, self.stderr = out[0], err[0]
        self.pipes = {} if attached else {1: self.stdout, 2: self.stderr}
        for pipe in self.pipes.values():
            os.set_blocking(pipe, False)
        self._reported: ExitReport | None = None
        self._report_file = None if report is None else ReportFile.of(report, err[1])
        self._env = {**task.env, **({} if self._report_file is None else self._report_file.variables)}
        # Several workers cannot share one input. One can: job control does not keep a session from a terminal that is
        # not its own.
        stdin = 0 if attached else subprocess.DEVNULL if stdin is None else stdin
        self._popen: dict[str, Any] = {"pass_fds": pass_fds, "stdin": stdin, "stdout": out[1], "stderr": err[1]}
        self._keeper_fd = keeper_fd
        self._tied: TiedProcess | None = None
        self._process: subprocess.Popen[bytes] | Forked | None = None
        self._unsent: list[int] = []  # signals to a process that does not exist yet
        self._cancelled: Exit | None = None
        if not forked:
            try:
                self._make()
            except LaunchError:
                _close([] if attached else [self.stdout, self.stderr])
                raise

    def _make(self) -> None:
        try:
            self._tied = TiedProcess(
                self.task.argv, self._env, keeper_fd=self._keeper_fd, start_new_session=True, **self._popen
            )
        except OSError as error:
            raise cannot_start(self.task, error) from None
        finally:
            self._close_ends()
        self._process = self._tied.process

    def execute(self, forks: ForkServer | None = None) -> None:
        """Execute the program, or ask the fork server for a process that does the same.

        Call it again, without a fork server, if that does not make the process.
        """
        if self._tied is None and forks is not None:
            out, err = self.ends
            with suppress(OSError):
                self._process = forks.fork(self.task.argv, self._env, out, err, self._keeper_fd)
                return
        if self._tied is None:
            self._make()
        assert self._tied is not None  # noqa: S101 (for the type checker)
        try:
            self._tied.execute()
        except OSError as error:
            raise cannot_start(self.task, error) from None

    def begin(self) -> None:
        """The fork server has made the process."""
        self._close_ends()
        for signum in self._unsent:
            self.signal(signum)

    def is_made_of(self, process: Forked) -> bool:
        return self._process is process

    def cancel(self, signum: int) -> None:
        """If the process does not exist yet, take it as killed by a signal to all processes of the job."""
        if not self.pid:
            self._cancelled = Exit(signum=signum)

    @property
    def cancelled(self) -> bool:
        return self._cancelled is not None

    def signal(self, signum: int) -> None:
        """Send a signal to its process group, once it exists."""
        if not self.pid:
            self._unsent.append(signum)
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signum)

    @property
    def pid(self) -> int:
        """0 as long as a fork server has not made it."""
        return 0 if self._process is None else self._process.pid

    def poll(self) -> Exit | None:
        """How it ended, or None while it runs."""
        if self.exit is None:
            self.exit = self._cancelled or (self._poll() if self.pid else None)
        return self.exit

    def report(self) -> ExitReport | None:
        """Why it ends, once it has said so. It may run on for a while. Each report is returned once."""
        report = None if self._report_file is None else self._report_file.read()
        if report == self._reported:
            return None
        self._reported = report
        return report

    def reap(self) -> None:
        """Reap an exited process. After that its group and session cannot be addressed, so they must be empty."""
        self._close_ends()
        if self._process is None:
            return
        self._process.poll()
        if self._process.returncode is None:
            self._process.returncode = -signal.SIGKILL  # it survives SIGKILL, and is given up

    def _close_ends(self) -> None:
        ends, self.ends = self.ends, ()
        _close(ends)

    def _poll(self) -> Exit | None:
        if sys.platform == "darwin":  # where waitid is missing before 3.13: reaped at once
            code = self._process.poll() if self._process is not None else None
            return None if code is None else Exit.of(code)
        state = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if state is None:
            return None
        return Exit(code=state.si_status) if state.si_code == os.CLD_EXITED else Exit(signum=state.si_status)


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def require_command(task: Task | Program, directory: str = ".") -> None:
    """Check that what a task executes exists, before anything runs.

    `directory`: the working directory that it will have.
    """
    program = task.argv[0]
    if os.sep in program:
        program = os.path.join(directory, program)  # noqa: PTH118 (a Path would be without the `./` that keeps it off PATH)
    if shutil.which(program, path=task.env.get("PATH")) is None:
        exists = os.sep in program and Path(program).exists()
        raise cannot_start(task, PermissionError(0, "is not executable") if exists else FileNotFoundError(), directory)


def cannot_start(task: Task | Program, error: OSError, directory: str = ".") -> LaunchError:
    """The error for a program that cannot be executed, with the exit code of a shell. `error`: what the system says."""
    program = task.argv[0]
    found = Path(directory) / program
    meant = suggestion(task.argv, task.env.get("PATH", os.environ.get("PATH", os.defpath)), directory)
    hint = f"; did you mean: {meant}?" if meant else ""
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        # Without a slash, it was looked for on PATH alone.
        if os.sep in program and found.is_file():
            return LaunchError(
                f"cannot start {task.name}: the interpreter that {program} names does not exist{hint}", NOT_FOUND
            )
        if " " in program:
            hint = "; quote the whole command, or none of it"
        return LaunchError(f"cannot start {task.name}: there is no command {program}{hint}", NOT_FOUND)
    return LaunchError(f"cannot start {task.name}: {program}: {error.strerror}{hint}", CANNOT_EXECUTE)


_CLOSE = 0.75  # of difflib's ratio: `pyhton` is 0.83 from `python`
_LONGEST = 100  # characters of a command that are shown


def suggestion(argv: Sequence[str], search_path: str, directory: str = ".") -> str:
    """The command that the user may have meant; empty if there is no guess. `search_path`: the PATH."""
    program = argv[0]
    if _is_script(Path(directory) / program):
        return _shown([PYTHONS[0], *argv])
    if os.sep in program or " " in program:
        return ""
    # Python goes first: of names that are equally close, it is the likeliest.
    names = [*PYTHONS, *sorted(_programs(search_path))]
    close = difflib.get_close_matches(program, names, n=1, cutoff=_CLOSE)
    return _shown([*close, *argv[1:]]) if close else ""


def _is_script(path: Path) -> bool:
    return path.suffix == ".py" and path.is_file()


def _programs(search_path: str) -> set[str]:
    names: set[str] = set()
    for directory in search_path.split(os.pathsep):
        with suppress(OSError), os.scandir(directory or ".") as entries:
            names.update(entry.name for entry in entries if os.access(entry.path, os.X_OK))
    return names


def _shown(words: Sequence[str]) -> str:
    text = shlex.join(words)
    return text if len(text) <= _LONGEST else text[:_LONGEST].rsplit(" ", 1)[0] + " ..."
