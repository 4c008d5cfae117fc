"""The processes of a job that a rank starts beside itself, through their supervisor, and whose end it waits for."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvstore.bootstrap.server_supervisor import SupervisedJob, SupervisedProcess
from kvstore.job.config import Config, inherited
from kvstore.job.processes import complete, source_root, words

END_S = 10.0


class MemberProcesses:
    """Processes of a job. They run from construction on.

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
        try:
            self._supervisor = subprocess.Popen(
                words(sys.executable, "kvstore.bootstrap"),
                stdin=subprocess.PIPE,
                stdout=2,
                env=complete(inherited({}), source_root()),
                pass_fds=() if root_fd < 0 else (root_fd,),
                start_new_session=True,  # Ctrl-C is for the script, at whose end this ends
            )
        except BaseException:
            self._remove()
            raise
        if self._supervisor.stdin is not None:
            with contextlib.suppress(BrokenPipeError), self._supervisor.stdin as pipe:  # it has said why it ended
                pipe.write(task.dumps().encode())

    def wait(self) -> None:
        """Wait until all have ended: when all workers have left, or the job has failed."""
        if os.getpid() != self._pid:
            return  # a fork of that process, which has no children here
        try:
            self._supervisor.wait()
        finally:
            self.end()

    def end(self) -> None:
        """End the processes that still run. May be called again."""
        self._supervisor.terminate()
        try:
            self._supervisor.wait(END_S)
        except subprocess.TimeoutExpired:
            self._supervisor.kill()
            self._supervisor.wait()
        self._remove()

    def _remove(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)
