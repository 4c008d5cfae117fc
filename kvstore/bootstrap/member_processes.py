"""The processes of a job that a rank starts beside itself, through their supervisor, and whose end it waits for."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvstore.bootstrap.server_supervisor import SupervisedJob, SupervisedProcess
from kvstore.job.config import Config, inherited
from kvstore.job.processes import complete, orphaned, source_root, words

END_S = 10.0


class MemberProcesses:
    """Processes of a job. They run from construction on.

    Their supervisor is no child of this process: a program may wait for all of its children (``os.wait``), and the
    supervisor ends when the program does. So its end is that of a pipe, which nobody else can write to, and it says its
    number there.

    Args:
        config: the settings of the rank that starts them.
        rank: which worker it is.
        members: what to start.
        reporter: the variables of a member that may report on all others: the scheduler's.
        directory: a private directory, which goes with them.
        remove: a file that the supervisor removes with them, if this process cannot.
        root_fd: the scheduler's listening socket, -1 for none.
    """

    def __init__(
        self,
        config: Config,
        rank: int,
        members: Sequence[SupervisedProcess],
        reporter: Mapping[str, str],
        directory: str,
        remove: Path | None = None,
        root_fd: int = -1,
    ) -> None:
        self._pid = os.getpid()
        self._directory = directory
        task = SupervisedJob(
            self._pid,
            rank,
            list(members),
            dict(reporter),
            directory,
            [directory, *([] if remove is None else [str(remove)])],
            root_fd,
            config.heartbeat_timeout_s + 5.0,  # until whoever cannot be told has heard the silence
        )
        ended, its_end = os.pipe()
        self._alive = os.fdopen(ended, "rb", buffering=0)
        self._said = b""
        try:
            between = subprocess.Popen(
                orphaned(words(sys.executable, "kvstore.bootstrap")),
                stdin=subprocess.PIPE,
                stdout=its_end,
                env=complete(inherited({}), source_root()),
                pass_fds=() if root_fd < 0 else (root_fd,),
                start_new_session=True,  # Ctrl-C is for the script, at whose end this ends
            )
        except BaseException:
            self._alive.close()
            self._remove()
            raise
        finally:
            os.close(its_end)
        between.wait()
        if between.stdin is not None:
            with contextlib.suppress(BrokenPipeError), between.stdin as pipe:  # it has said why it ended
                pipe.write(task.dumps().encode())

    def wait(self) -> None:
        """Wait until all have ended: when all workers have left, or the job has failed."""
        if os.getpid() != self._pid:
            return  # a fork of that process, which has no children here
        try:
            self._ended()
        finally:
            self.end()

    def end(self) -> None:
        """End the processes that still run. May be called again."""
        for signum, patience_s in ((signal.SIGTERM, END_S), (signal.SIGKILL, None)):
            if self._ended(0.0):
                break
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid_of_supervisor(), signum)
            self._ended(patience_s)
        self._remove()

    def _ended(self, patience_s: float | None = None) -> bool:
        """Wait until the supervisor has ended; return whether it has."""
        deadline = None if patience_s is None else time.monotonic() + patience_s
        while not self._alive.closed:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            poll = select.poll()  # a rank may have more open files than select() can look at
            poll.register(self._alive, select.POLLIN)
            if not poll.poll(None if left is None else 1000 * left):
                return False
            said = self._alive.read(64)
            self._said += said
            if not said:
                self._alive.close()
        return True

    def _pid_of_supervisor(self) -> int:
        """Its number, which it says as soon as it runs. There is none to signal if it has ended before."""
        while b"\n" not in self._said and not self._ended(0.01):
            pass
        if b"\n" not in self._said:
            raise ProcessLookupError
        return int(self._said)

    def _remove(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)
