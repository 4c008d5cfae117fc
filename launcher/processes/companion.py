"""The observer beside a job: a process that is no member of it, and serves its page or writes its trace.

Its end changes nothing; one line reports it. The address of the page is known before anything starts.
"""

from __future__ import annotations

import os
import secrets
import selectors
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from kvstore.job import processes
from kvstore.job.page_address import lines, listen, token_of
from kvstore.job.place import FILE
from kvstore.job.settings import (
    DASHBOARD_FD,
    DASHBOARD_TOKEN,
    DASHBOARD_TOKEN_FILE,
    LIFELINE,
    OBSERVE,
    ROLE,
    TRACE,
    TRACE_FILE,
)
from kvstore.job.trace_target import TraceTarget
from launcher.errors import LaunchError, as_launch_error
from launcher.job.description import Job
from launcher.job.tasks import outside_a_job
from launcher.output.lines import Prefixer
from launcher.processes.child import Child, OutputPipe, Program
from launcher.supervision.crew import Crew, Sink

_POLL_S = 0.02


class Companion(Crew):
    """Runs a companion as long as its job; a crew that has no tasks.

    The job does not wait for it, and signals are for the job alone: it sees the end of the job, and then ends itself.

    Its standard input ends when the job is over, and when launch.py dies: then it must end. What it writes is shown,
    line by line, as said by launch.py.

    Args:
        program: what to run. Its environment has neither the mark of the job nor that of an agent, by which members
            are found and ended.
        announcement: lines that are shown before it starts; they may hold secrets.
        pass_fds: the file descriptors that it inherits beside its standard streams.
        grace_s: how long it may take to end when the job is over.
    """

    def __init__(
        self,
        program: Program,
        announcement: Sequence[str] = (),
        pass_fds: tuple[int, ...] = (),
        grace_s: float = 2.0,
    ) -> None:
        self.program, self.announcement = program, announcement
        self.pass_fds, self.grace_s = pass_fds, grace_s
        self._child: Child | None = None
        self._lifeline = -1
        self._pipes: list[OutputPipe] = []
        self._reported = False

    def start(self, selector: selectors.BaseSelector, sink: Sink) -> None:
        self._selector, self._sink = selector, sink
        for line in self.announcement:
            sink.say(line, secret=True)
        theirs, self._lifeline = os.pipe()
        try:
            self._child = Child(self.program, pass_fds=self.pass_fds, stdin=theirs)
            self._child.execute()
        except LaunchError as error:
            sink.say(f"{error}; the job goes on without it")
            self._reported = True
        finally:
            os.close(theirs)
        if self._child is not None:
            self._pipes = [OutputPipe(source, Prefixer.into(self._say)) for source in self._child.pipes.values()]
            for pipe in self._pipes:
                pipe.register(selector)

    def collect(self) -> None:
        if self._child is None or self._reported or (how := self._child.poll()) is None:
            return
        self._reported = True
        self._drain()
        if how.status:
            self._sink.say(f"the {self.program.name} is gone: it {how}; the job goes on without it")

    def close(self) -> None:
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        if self._child is None:
            return
        deadline = time.monotonic() + self.grace_s
        while self._child.poll() is None and time.monotonic() < deadline:
            self._drain()
            time.sleep(_POLL_S)
        self.collect()
        if self._child.exit is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._child.pid, signal.SIGKILL)
        self._drain()
        for pipe in self._pipes:
            pipe.finish()
        self._child.reap()
        self._child = None

    def _drain(self) -> None:
        for pipe in self._pipes:
            pipe.drain()

    def _say(self, lines: bytes) -> None:
        for line in lines.splitlines():
            self._sink.say(line.decode(errors="surrogateescape"))


SHOWN_S = 2.0  # how long the page shows the end of a job
WRITTEN_S = 30.0  # how long the file of a trace may take to be written for the last time


@contextmanager
def companions(job: Job, directory: Path, environ: Mapping[str, str]) -> Iterator[list[Companion]]:
    """Have what runs beside a job: the observer, if it has anything to do; else nothing.

    `directory`: the job's private directory, with the file that tells observers where the job is.
    """
    told: dict[str, str] = {}
    pass_fds: tuple[int, ...] = ()
    announcement: list[str] = []
    with ExitStack() as stack:
        if job.cluster.dashboard is not None:
            listener = stack.enter_context(_listening(job.cluster.dashboard))
            file = job.cluster.dashboard_token_file or DASHBOARD_TOKEN_FILE.read(environ)
            with as_launch_error("--dashboard-token-file: ", exit_code=1):
                token = token_of(Path(file)) if file else secrets.token_urlsafe(32)
            pass_fds = (listener.fileno(),)
            told |= {DASHBOARD_FD.name: str(listener.fileno()), DASHBOARD_TOKEN.name: token}
            announcement += lines(listener.getsockname()[1], token, environ)
        grace_s = SHOWN_S
        if job.cluster.trace is not None:
            target = TraceTarget.parse(job.cluster.trace)
            with as_launch_error("--trace: ", exit_code=1):
                target.prepare()
            told |= {TRACE_FILE.name: str(target.file), TRACE.name: str(target.rounds)}
            grace_s = WRITTEN_S
        if not told:
            yield []
            return
        told |= {ROLE.name: "observer", OBSERVE.name: str(directory / FILE), LIFELINE.name: "1"}
        env = processes.complete({**outside_a_job(environ), **told}, processes.source_root())
        name = "trace" if job.cluster.dashboard is None else "dashboard"
        program = Program(name, (*processes.words(sys.executable, "servers"), name), env)
        yield [Companion(program, announcement, pass_fds, grace_s)]


@contextmanager
def _listening(port: int) -> Iterator[socket.socket]:
    try:
        listener = listen(port)
    except OSError as error:
        why = os.strerror(error.errno or 0)
        raise LaunchError(f"--dashboard={port}: cannot listen at 127.0.0.1:{port}: {why}", exit_code=1) from None
    with listener:
        yield listener
