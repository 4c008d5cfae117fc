"""One process of a job, its two pipes, and how it ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from kvstore.job.processes import TiedProcess
from launcher.errors import CANNOT_EXECUTE, NOT_FOUND, LaunchError
from launcher.supervision.exits import Exit


class Program(Protocol):
    """What to execute; a task is one."""

    @property
    def name(self) -> str:
        """What errors call it."""

    @property
    def argv(self) -> Sequence[str]:
        """Its words."""

    @property
    def env(self) -> Mapping[str, str]:
        """Its environment."""


class Child:
    """A task that is being started, the leader of a session of its own.

    Its process exists from construction on, and runs the program from `execute` on.

    It is not reaped when it exits, only at `reap`: until then its pid, which names its process group and its session,
    cannot be given to another process.

    Args:
        task: what to run.
        keeper_fd: the keeper's pipe, which the process tells of itself before it executes its program; -1 for none.
        pass_fds: the file descriptors that it inherits besides its standard streams.
        stdin: its standard input; nothing if None.

    Raises:
        LaunchError: there can be no more processes; the message names the program.
    """

    def __init__(
        self, task: Program, keeper_fd: int = -1, pass_fds: tuple[int, ...] = (), *, stdin: int | None = None
    ) -> None:
        self.task = task
        self.exit: Exit | None = None
        out, err = os.pipe(), os.pipe()
        try:
            self._tied = TiedProcess(
                task.argv,
                task.env,
                pass_fds=pass_fds,
                keeper_fd=keeper_fd,
                # Not the caller's: several workers cannot share a terminal's input, nor read it from their own session.
                stdin=subprocess.DEVNULL if stdin is None else stdin,
                stdout=out[1],
                stderr=err[1],
                start_new_session=True,
            )
        except OSError as error:
            os.close(out[0])
            os.close(err[0])
            raise cannot_start(task, error) from None
        finally:
            os.close(out[1])
            os.close(err[1])
        self.stdout, self.stderr = out[0], err[0]
        os.set_blocking(self.stdout, False)
        os.set_blocking(self.stderr, False)
        self._process = self._tied.process

    def execute(self) -> None:
        """Run the program. If that fails, the child has exited.

        Raises:
            LaunchError: the program cannot be executed; the message names it.
        """
        try:
            self._tied.execute()
        except OSError as error:
            raise cannot_start(self.task, error) from None

    @property
    def pid(self) -> int:
        """Its process, its process group and its session."""
        return self._process.pid

    def poll(self) -> Exit | None:
        """How it ended, or None while it runs."""
        if self.exit is None:
            self.exit = self._poll()
        return self.exit

    def reap(self) -> None:
        """Let go of an exited process. Its group and session must be empty, or they can no longer be addressed."""
        self._process.poll()
        if self._process.returncode is None:
            self._process.returncode = -signal.SIGKILL  # it does not die; there is nothing more to wait for

    def _poll(self) -> Exit | None:
        if sys.platform == "darwin":  # where waitid is missing before 3.13: reaped at once
            code = self._process.poll()
            return None if code is None else Exit(code=max(code, 0), signum=max(-code, 0))
        state = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if state is None:
            return None
        return Exit(code=state.si_status) if state.si_code == os.CLD_EXITED else Exit(signum=state.si_status)


def cannot_start(task: Program, error: OSError) -> LaunchError:
    """What to tell the user when a program cannot be executed, with the exit code that a shell would give."""
    program = task.argv[0]
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        if Path(program).is_file():
            return LaunchError(
                f"cannot start {task.name}: the interpreter that {program} names does not exist", NOT_FOUND
            )
        hint = "; quote the whole command, or none of it" if " " in program else ""
        return LaunchError(f"cannot start {task.name}: there is no command {program}{hint}", NOT_FOUND)
    return LaunchError(f"cannot start {task.name}: {program}: {error.strerror}", CANNOT_EXECUTE)
