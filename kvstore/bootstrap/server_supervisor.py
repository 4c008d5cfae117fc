"""The process between rank 0 and the servers: starts them, reports one that fails, and ends all when rank 0 is gone.

It is ``python -m kvstore.bootstrap``, a child of rank 0's process, with a ``SupervisedJob`` on its standard input. Only
a process of its own can do this: SIGKILL cannot be caught, and a parent-death signal would come when the thread ends
that made the store. The servers get that signal from this process, whose only thread ends with it.

launch.py is a supervisor itself, so its keeper (``launcher/processes/keeper.py``) only cleans up after it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType

from kvstore.bootstrap.report import tell
from kvstore.errors import JOB_FAILED_EXIT
from kvstore.job.config import inherited
from kvstore.job.contract import member_name
from kvstore.job.exits import Exit
from kvstore.job.processes import TiedProcess

POLL_S = 0.05
LAST_WORDS_S = 2.0  # how long the members may take to hear of a failure and to say so, before they are killed


@dataclass(frozen=True)
class SupervisedProcess:
    """One process to start.

    Attributes:
        role, rank: which member of the job it is.
        argv: what it runs.
        variables: what its environment has beside the supervisor's.
    """

    role: str
    rank: int
    argv: list[str]
    variables: dict[str, str] = field(repr=False)

    @property
    def name(self) -> str:
        """As ``server 1``."""
        return member_name(self.role, self.rank)


@dataclass(frozen=True)
class SupervisedJob:
    """All that the supervisor is told.

    Attributes:
        parent: the process to outlive by a moment only.
        members: what to start, the scheduler first.
        remove: files and directories that must not outlive the job.
        root_fd: the scheduler's listening socket, which the supervisor inherits; -1 if there is none.
        patience_s: how long the others may take to end by themselves once a member has failed.
    """

    parent: int
    members: list[SupervisedProcess]
    remove: list[str]
    root_fd: int
    patience_s: float

    def dumps(self) -> str:
        """A text for ``loads``."""
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str) -> SupervisedJob:
        """The orders that ``dumps`` has made a text of."""
        fields = json.loads(text)
        return cls(**fields | {"members": [SupervisedProcess(**member) for member in fields["members"]]})


class ServerSupervisor:
    """Runs a job's processes to their end; main thread only.

    Args:
        task: what to run.
        report: tells the scheduler that a process has ended: role, rank, and how in words.
    """

    def __init__(self, task: SupervisedJob, report: Callable[[str, int, str], None]) -> None:
        self._task = task
        self._report = report
        self._running: list[tuple[SupervisedProcess, subprocess.Popen[bytes]]] = []
        self._deadline = float("inf")
        self._told_to_end = False
        self._code = 0

    def run(self) -> int:
        """Start all, and return when all have ended: 0, or 1 if one has failed or had to be killed."""
        signal.signal(signal.SIGTERM, self._end)
        try:
            prepared = [self._prepare(member) for member in self._task.members]
            self._running = [(member, tied.process) for member, tied in zip(self._task.members, prepared, strict=True)]
            for tied in prepared:
                tied.execute()
            if self._task.root_fd >= 0:
                os.close(self._task.root_fd)  # or the kernel would accept for a scheduler that has died
            while self._running:
                self._collect()
                self._look_up()
                if time.monotonic() > self._deadline:
                    self._code = 1
                    break
                time.sleep(POLL_S)
        finally:
            self._clean()
        return self._code

    def _prepare(self, member: SupervisedProcess) -> TiedProcess:
        fd = self._task.root_fd if member.role == "scheduler" else -1
        return TiedProcess(
            member.argv,
            os.environ | member.variables,
            pass_fds=(fd,) if fd >= 0 else (),
            stdin=subprocess.DEVNULL,
            stdout=2,  # what servers say is not the script's output
        )

    def _collect(self) -> None:
        """Notice who has ended; what one died of is for all to know."""
        for member, process in [running for running in self._running if running[1].poll() is not None]:
            self._running.remove((member, process))
            code = process.returncode
            if code in (0, JOB_FAILED_EXIT) or self._deadline < float("inf"):
                continue
            how = str(Exit.of(code))
            print(f"kvstore: {member.name} {how}", file=sys.stderr, flush=True)
            self._fail(member.role, member.rank, how, self._task.patience_s)

    def _look_up(self) -> None:
        """Notice that rank 0's process has gone without waiting for this one, or wants all to end."""
        if self._deadline == float("inf") and (self._told_to_end or os.getppid() != self._task.parent):
            self._fail("worker", 0, "ended without leaving the job", LAST_WORDS_S)

    def _fail(self, role: str, rank: int, how: str, patience_s: float) -> None:
        self._code = 1
        self._deadline = time.monotonic() + patience_s
        with suppress(Exception):  # who could be told of this? what is to end ends by its deadline
            self._report(role, rank, how)

    def _clean(self) -> None:
        for _, process in self._running:
            process.kill()
        for _, process in self._running:
            process.wait()
        for name in self._task.remove:
            path = Path(name)
            with suppress(OSError):
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        if self._code:
            from kvstore.transport.shm.presence import sweep

            sweep()

    def _end(self, _signal: int, _frame: FrameType | None) -> None:
        self._told_to_end = True


def main() -> int:
    """Follow the orders on standard input."""
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(signum, signal.SIG_IGN)
    task = SupervisedJob.loads(sys.stdin.read())
    return ServerSupervisor(task, partial(tell, inherited(task.members[0].variables))).run()
