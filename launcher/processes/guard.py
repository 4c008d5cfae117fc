"""What ends a job's processes, or cancels what a cluster manager runs for it, if this process is killed."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from launcher.job.tasks import MARK
from launcher.processes import keeper

MAX_RESTARTS = 3
GOODBYE_S = 1.0


class Guard:
    """Ensures that no process of a job outlives launch.py, or an agent.

    If the keeper dies, the guard starts another one and tells it of all processes. After MAX_RESTARTS it gives up, and
    the job goes on with the parent-death signal alone.

    Args:
        directory: the job's directory, which the keeper removes if this process cannot.
        mark: the value of `variable` in the environment of the job's processes.
        variable: the environment variable that marks the job's processes.
        job: the name of the job, which is part of the names of its shared memory; the mark if None.
    """

    def __init__(self, directory: Path, mark: str, *, variable: str = MARK, job: str | None = None) -> None:
        self.mark = f"{variable}={mark}"
        self._variable = variable
        self._job = mark if job is None else job
        # In the order of their start, so the scheduler gets a signal first. A server that ended before it would report
        # its end to the scheduler, which would print that the job has failed.
        self.sessions: dict[int, None] = {}
        self.directory = directory
        self._restarts = 0
        self._pipe = -1
        self._process: subprocess.Popen[bytes] | None = None
        self._start()

    def fileno(self) -> int:
        """The pipe to the keeper, or -1 if there is none any more.

        A new process writes its pid to it before it executes its program. So no program runs that the keeper does not
        know of.
        """
        return self._pipe

    def add(self, pid: int) -> None:
        self.sessions[pid] = None

    def recheck(self) -> str | None:
        """Replace the keeper if it has died. Returns what to tell the user; None if the keeper is alive."""
        if self._process is None or self._process.poll() is None:
            return None
        self._close()
        self._restarts += 1
        # What has killed three keepers, such as a memory limit, will kill the next one, too.
        if self._restarts > MAX_RESTARTS:
            return "the keeper process died again; if launch.py is killed, processes may stay behind"
        self._start()
        for pid in self.sessions:
            self._tell(b"%d\n" % pid)
        return "the keeper process died; started another"

    def signal(self, signum: int) -> None:
        keeper.signal_all(self.sessions, self.mark, signum)

    def leftovers(self) -> bool:
        """Whether any process of the job is alive. Always false on systems without /proc."""
        try:
            return bool(keeper.strays(self.sessions, self.mark))
        except OSError:
            return False  # `kill` reports it, if it lasts

    def kill(self) -> None:
        try:
            keeper.kill_all(self.sessions, self.mark, patience=1.0)
        except OSError as error:  # the exit code of the job matters more
            print(f"launch.py: cannot see whether processes of the job are left: {error.strerror}", file=sys.stderr)

    def dismiss(self) -> None:
        """Dismiss the keeper. The job's processes and its directory must be gone."""
        if self._process is None:
            return
        self._tell(b"bye\n")
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(GOODBYE_S)
        if self._process.returncode is None:
            self._process.kill()
            self._process.wait()
        self._close()

    def _start(self) -> None:
        read, self._pipe = os.pipe()
        try:
            self._process = subprocess.Popen(
                # Isolated: PYTHONPATH and sitecustomize are the user's, for the job.
                [sys.executable, "-I", keeper.__file__, str(self.directory), self.mark, self._job],
                stdin=read,
                # It must not keep the terminal open, nor the pipe that launch.py's output goes to.
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                # If this is part of another job, the end of that one must not kill this keeper.
                env={name: value for name, value in os.environ.items() if name != self._variable},
                start_new_session=True,
            )
        finally:
            os.close(read)

    def _tell(self, line: bytes) -> None:
        # recheck() notices that the keeper is dead, and tells the next one.
        with suppress(BrokenPipeError):
            os.write(self._pipe, line)

    def _close(self) -> None:
        os.close(self._pipe)
        self._process, self._pipe = None, -1


# If the input ends without a line, the process that held it is dead.
_WAIT = "if read -r line; then exit 0; fi"
_GOODBYE_S = 1.0


class LastWill:
    """A command that a process in a session of its own runs when this process dies, unless it is revoked.

    Args:
        argv: the command; empty for none. Other users can see it, so it must not hold secrets.
        remove: files and directories to remove afterwards.
    """

    def __init__(self, argv: Sequence[str] = (), remove: Sequence[Path] = ()) -> None:
        commands = [list(argv)] if argv else []
        if remove:
            commands.append(["rm", "-rf", "--", *map(str, remove)])
        self.process = subprocess.Popen(
            ["/bin/sh", "-c", "\n".join([_WAIT, *map(shlex.join, commands)])],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def revoke(self) -> None:
        if self.process.stdin is None or self.process.stdin.closed:
            return
        with suppress(OSError):
            self.process.stdin.write(b"bye\n")
            self.process.stdin.close()
        try:
            self.process.wait(_GOODBYE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
