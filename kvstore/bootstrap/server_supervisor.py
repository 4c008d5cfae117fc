"""The process between a rank and what it starts: starts that, reports a failure, and ends all when the rank is gone.

``MemberProcesses`` is the rank's side of it.

Rank 0 starts the scheduler and the servers so, and a rank of each host with an aggregator starts that.

Its members tell it why they end. It prints one root cause, after what the workers print: what comes last is read first.

It is ``python -m kvstore.bootstrap``, with a ``SupervisedJob`` on its standard input. The rank's process has started
it, but is not its parent: see ``MemberProcesses``. The end of its standard output tells that process of its end.
Only a process of its own can do this: SIGKILL cannot be caught, and a parent-death signal would come when the thread
ends that made the store. The servers get that signal from this process, whose only thread ends with it.

launch.py is a supervisor itself, so its keeper (``launcher/processes/keeper.py``) only cleans up after it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType

from kvstore.bootstrap.report import tell
from kvstore.errors import JOB_FAILED_EXIT
from kvstore.job.config import Config, inherited
from kvstore.job.contract import member_name
from kvstore.job.exit_report import ExitReport, Owner, ReportFile
from kvstore.job.forking import FORK_SERVER, Forked, ForkServer, alike
from kvstore.job.processes import Exit, TiedProcess, complete, orphaned, source_root, words

POLL_S = 0.05
LAST_WORDS_S = 2.0  # how long the members may take to hear of a failure and to say so, before they are killed
HEARD_S = 0.2  # how long after a failure all workers have heard of it, and have said that they end
GONE = "ended without leaving the job; torchrun, mpirun or srun may say why"
STDERR = 2


INTERRUPTED = f": {KeyboardInterrupt.__name__}"  # a worker's error after Ctrl-C, which needs no explanation


@dataclass(frozen=True)
class MemberEnd:
    """How one of the supervised processes has ended, or will, and why, if it has said so.

    It is blameless if it ended in order, or when another process had failed.
    """

    name: str
    how: str
    report: ExitReport | None
    blameless: bool

    @classmethod
    def expected(cls, name: str, report: ExitReport) -> MemberEnd:
        """The end of a process that has told why it will end, and still runs."""
        return cls(name, "has failed", report, report.consequence)


def root_cause(ends: Sequence[MemberEnd]) -> str:
    """Why a job has failed, in one line, or with a traceback; empty if nothing says that it has.

    ``ends`` is in the order in which the processes ended; why others will end comes last.
    """
    for end in ends:
        if not end.blameless and (end.report is None or not end.report.consequence):
            return _in_full(end)
    # All others hear of a failure from the scheduler. Supervisors on other hosts leave it to this one to say so.
    error = next((end.report.error for end in ends if end.name == "scheduler" and end.report is not None), "")
    return f"the job has failed: {error}" if error and not error.endswith(INTERRUPTED) else ""


def _in_full(end: MemberEnd) -> str:
    if end.report is None:
        return f"{end.name} {end.how}"
    return f"{end.name} {end.how}:\n{end.report.details or end.report.error}".rstrip()


@dataclass(frozen=True)
class SupervisedProcess:
    """One process to start; ``variables`` go on top of the supervisor's environment."""

    role: str
    rank: int
    argv: list[str]
    variables: dict[str, str] = field(repr=False)

    @property
    def name(self) -> str:
        return member_name(self.role, self.rank)


@dataclass(frozen=True)
class SupervisedJob:
    """All that the supervisor is told.

    Attributes:
        parent: the process to outlive by a moment only, worker ``rank``.
        reporter: the variables of a member that may report on all others: the scheduler's.
        directory: where members write why they end.
        remove: files and directories that must not outlive the job.
        root_fd: the scheduler's listening socket, which the supervisor inherits; -1 if there is none.
        patience_s: how long the others may take to end by themselves once a member has failed.
    """

    parent: int
    rank: int
    members: list[SupervisedProcess]
    reporter: dict[str, str] = field(repr=False)
    directory: str
    remove: list[str]
    root_fd: int
    patience_s: float

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str) -> SupervisedJob:
        fields = json.loads(text)
        return cls(**fields | {"members": [SupervisedProcess(**member) for member in fields["members"]]})


class ServerSupervisor:
    """Runs a job's processes to their end; main thread only. ``report`` tells the scheduler how one ended."""

    def __init__(self, task: SupervisedJob, report: Callable[[str, int, str], object]) -> None:
        self._task = task
        self._report = report
        self._parent = Owner.of(task.parent)
        self._running: list[tuple[SupervisedProcess, subprocess.Popen[bytes] | Forked]] = []
        self._forks: ForkServer | None = None
        self._ends: list[MemberEnd] = []
        self._deadline = self._explain_at = float("inf")
        self._explained = self._told_to_end = False
        self._code = 0

    def run(self) -> int:
        """Start all, and return when all have ended: 0, or 1 if one has failed or had to be killed."""
        signal.signal(signal.SIGTERM, self._end)
        try:
            self._start()
            if self._task.root_fd >= 0:
                os.close(self._task.root_fd)  # or the kernel would accept for a scheduler that has died
            while self._running:
                self._note_forked()
                self._collect()
                self._look_up()
                self._explain()
                if time.monotonic() > self._deadline:
                    self._code = 1
                    break
                time.sleep(POLL_S)
        finally:
            self._clean()
        return self._code

    def _start(self) -> None:
        members = enumerate(self._task.members)
        forked, env = alike({i: (each.argv, self._env(each)) for i, each in members if each.role != "scheduler"})
        if forked:
            with suppress(OSError):  # an interpreter for each is tried then
                forks = ForkServer(FORK_SERVER, env, -1, STDERR)
                forks.execute()
                self._forks = forks
        prepared = []
        for i, member in enumerate(self._task.members):
            process: subprocess.Popen[bytes] | Forked | None = self._fork(member) if i in forked else None
            if process is None:
                prepared.append(self._prepare(member))
                process = prepared[-1].process
            self._running.append((member, process))
        for tied in prepared:
            tied.execute()

    def _fork(self, member: SupervisedProcess) -> Forked | None:
        if self._forks is not None:
            with suppress(OSError):
                return self._forks.fork(member.argv, self._env(member), STDERR, STDERR, -1)
        return None

    def _note_forked(self) -> None:
        """Learn which processes the fork server has made. Start an interpreter for what it has not made."""
        if self._forks is None:
            return
        self._forks.collect()
        if self._forks.asked and not self._forks.ended:
            return
        never = self._forks.asked
        self._forks.close()
        self._forks = None
        for place, (member, process) in enumerate(self._running):
            if process in never:
                tied = self._prepare(member)
                self._running[place] = (member, tied.process)
                tied.execute()

    def _env(self, member: SupervisedProcess) -> dict[str, str]:
        return os.environ | member.variables | self._report_file(member).variables

    def _prepare(self, member: SupervisedProcess) -> TiedProcess:
        fd = self._task.root_fd if member.role == "scheduler" else -1
        return TiedProcess(
            member.argv,
            self._env(member),
            pass_fds=(fd,) if fd >= 0 else (),
            stdin=subprocess.DEVNULL,
            stdout=STDERR,  # what servers say is not the script's output
        )

    def _collect(self) -> None:
        """Note which members have ended; report what one died of to all others."""
        for member, process in [running for running in self._running if running[1].poll() is not None]:
            self._running.remove((member, process))
            how = str(Exit.of(process.returncode or 0))
            blameless = process.returncode in (0, JOB_FAILED_EXIT) or self._deadline < float("inf")
            self._ends.append(MemberEnd(member.name, how, self._report_file(member).read(), blameless))
            if not blameless:
                self._fail(member.role, member.rank, how, self._task.patience_s)

    def _look_up(self) -> None:
        """Notice that the rank's process has gone without waiting for this one, or wants all to end."""
        if self._deadline == float("inf") and (self._told_to_end or not self._parent.alive):
            self._fail("worker", self._task.rank, GONE, LAST_WORDS_S)

    def _fail(self, role: str, rank: int, how: str, patience_s: float) -> None:
        self._code = 1
        self._deadline = time.monotonic() + patience_s
        with suppress(Exception):  # nobody can be told; all end by the deadline in any case
            self._report(role, rank, how)

    def _report_file(self, member: SupervisedProcess) -> ReportFile:
        return ReportFile.of(Path(self._task.directory) / f"{member.role}-{member.rank}.json", STDERR)

    def _explain(self) -> None:
        """Say why the job has failed, once, when the workers have heard of it: they print their errors themselves."""
        if self._explained:
            return
        reports = [(member.name, self._report_file(member).read()) for member, _ in self._running]
        cause = root_cause([*self._ends, *(MemberEnd.expected(name, report) for name, report in reports if report)])
        if cause:
            self._explain_at = min(self._explain_at, time.monotonic() + HEARD_S)
        if cause and (not self._running or time.monotonic() >= self._explain_at):
            print(f"{cause}\n", end="", file=sys.stderr, flush=True)  # one write: workers print at the same time
            self._explained = True

    def _clean(self) -> None:
        if self._forks is not None:
            self._forks.close()
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
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(signum, signal.SIG_IGN)
    task = SupervisedJob.loads(sys.stdin.read())
    return ServerSupervisor(task, partial(tell, inherited(task.reporter))).run()


END_S = 10.0


class MemberProcesses:
    """Processes of a job. They run from construction on.

    Their supervisor is no child of this process: a program may wait for all of its children (``os.wait``), and the
    supervisor ends when the program does. So its end is that of a pipe, to which nobody else can write.

    Args:
        config: the settings of worker ``rank``, which starts them.
        reporter, root_fd: see ``SupervisedJob``.
        directory: a private directory, which goes with them.
        remove: a file that the supervisor removes with them, if this process cannot.
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
            config.heartbeat_timeout_s + 5.0,  # until a member that cannot be told has noticed the silence
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
        """Its number, which the shell that started it has said."""
        while b"\n" not in self._said and not self._ended(0.01):
            pass
        if b"\n" not in self._said:
            raise ProcessLookupError
        return int(self._said)

    def _remove(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)
