"""One job while it runs: what is made for it on this machine, and what is removed at its end.

Two files tell others where the job is: one in its private directory, for observers such as `kvstore-status`, and that
of `--readers`, which has the key of readers.
"""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvstore.job.address import tcp_endpoint
from kvstore.job.curve_keys import ROOT, with_key
from kvstore.job.place import FILE, MAX_COMMAND, ObservingPlace, address_and_key
from kvstore.job.settings import TRANSPORT
from kvstore.reading.readers_file import ReadingPlace
from launcher.errors import LaunchError, as_launch_error
from launcher.job.description import Job
from launcher.job.tasks import MARK, Rendezvous, Task
from launcher.output.outlet import Outlet
from launcher.processes.children import Children
from launcher.processes.companion import Companion, companions
from launcher.processes.guard import Guard
from launcher.processes.jobdir import JobDir
from launcher.supervision.crew import Crew, SignalQueue
from launcher.supervision.ending import EndingLimits
from launcher.supervision.restarts import Restarts
from launcher.supervision.supervisor import Drill, OnFailure, Supervisor


def write_observers_file(directory: Path, job: Job, at: Rendezvous, environ: Mapping[str, str]) -> None:
    """Tell observers where the job meets, by a file in its private directory, which goes with it."""
    with as_launch_error():
        transport = TRANSPORT.read(environ)
    address, key = address_and_key(at.uri, at.port, at.keyring)
    place = ObservingPlace(
        *(address, key, transport),
        job=at.mark,
        command=" ".join(job.command)[:MAX_COMMAND],
        launcher=at.cluster,
        pid=os.getpid(),
        started=time.time(),
        workers=job.num_workers,
        servers=job.num_servers,
    )
    try:
        place.write(directory / FILE, durable=False)
    except OSError as error:
        raise LaunchError(f"cannot write {directory / FILE}: {error.strerror}", exit_code=1) from None


@contextmanager
def readers_file(job: Job, at: Rendezvous, environ: Mapping[str, str]) -> Iterator[None]:
    """Have the file of a job with readers there while the block runs."""
    if job.cluster.readers is None:
        yield
        return
    path = Path(job.cluster.readers)
    address, key = at.uri if at.uri.startswith("ipc://") else tcp_endpoint(at.uri, at.port), ""
    if at.keyring is not None and at.keyring.reader is not None:
        address, key = with_key(address, at.keyring.pairs[ROOT][0]), at.keyring.reader[1]
    try:
        with as_launch_error():
            ReadingPlace(address, key, TRANSPORT.read(environ)).write(path)
    except OSError as error:
        raise LaunchError(f"--readers: cannot write {path}: {error.strerror}", exit_code=1) from None
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()


@dataclass(frozen=True)
class Caller:
    """What runs the job: launch.py, or a script by `launcher.run`.

    Args:
        crew: makes the crew that runs tasks on this machine; it takes what `Children` takes.
    """

    name: str = "launch.py"  # the prefix of its own lines
    signals: SignalQueue = field(default_factory=SignalQueue)  # the signals that end the job
    outlet: Outlet = field(default_factory=Outlet)  # where the output of the job's processes goes
    crew: Callable[..., Crew] = Children
    says_start: bool = True  # whether a line says what starts
    gives_input: bool = True  # whether a worker may have the standard input of this process


class JobRun:
    """A job's directory, keeper, files for observers and readers, companions, restarts, faults, and loop.

    A context: at its end no process of the job is left, and nothing in files.

    Args:
        limits: how long the phases of an ending may last.
        caller: what runs the job. Its signals have been entered.
        variable: the environment variable that marks the processes of the job on this machine.
        selector: a selector that the crews use already; None for a new one.
    """

    def __init__(
        self,
        job: Job,
        on_failure: OnFailure,
        environ: Mapping[str, str],
        limits: EndingLimits | None = None,
        caller: Caller | None = None,
        *,
        variable: str = MARK,
        selector: selectors.BaseSelector | None = None,
    ) -> None:
        self.job, self.environ = job, environ
        self.caller = Caller() if caller is None else caller
        self._on_failure, self._limits, self._selector = on_failure, limits, selector
        self._beside: list[Companion] = []
        self._listener: socket.socket | None = None
        with ExitStack() as stack:
            self.directory = JobDir.make()
            stack.callback(self.directory.remove)  # if there is no keeper
            self.guard = Guard(self.directory.path, self.directory.path.name, variable=variable)
            stack.callback(self.guard.dismiss)
            stack.callback(self.directory.remove)  # before the keeper goes, which removes it if this process is killed
            self.stack = stack.pop_all()

    def __enter__(self) -> JobRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def meet(self, listener: socket.socket | None, **more: Any) -> Rendezvous:
        """Choose where the members meet, tell observers and readers, and prepare what runs beside the job.

        `listener`: a socket that the scheduler inherits, and that is closed at the end of the job; None for a socket in
        the job's directory. `more`: what else is known of the `Rendezvous`.
        """
        self._listener = listener
        uri, port, fd = f"ipc://{self.directory.path}/scheduler", 0, None
        if listener is not None:
            self.stack.callback(listener.close)
            (uri, port), fd = listener.getsockname()[:2], listener.fileno()
        log = self.directory.scheduler_log if self.job.restarts else ""
        at = Rendezvous(uri, port, self.directory.path.name, fd=fd, scheduler_log=log, **more)
        write_observers_file(self.directory.path, self.job, at, self.environ)
        self.stack.enter_context(readers_file(self.job, at, self.environ))
        self._beside = self.stack.enter_context(companions(self.job, self.directory.path, self.environ))
        return at

    @property
    def scheduler_fds(self) -> Mapping[int, tuple[int, ...]]:
        """What the scheduler, the first task, inherits."""
        return {} if self._listener is None else {0: (self._listener.fileno(),)}

    def start(
        self, tasks: list[Task], crews: Sequence[Crew], where: str | None, attached: int | None = None
    ) -> Supervisor:
        """Start all tasks, and what runs beside them. Return the supervisor, which follows them to their end.

        Args:
            tasks: all tasks of the job, the scheduler's first.
            where: where they run, for the line that says what starts; None for no such line.
            attached: the task that has this process's terminal; None for none.
        """
        restarts = Restarts.of(self.job, tasks)
        supervisor = Supervisor(
            tasks,
            [*crews, *self._beside],
            self.caller.signals,
            self._on_failure,
            environ=self.environ,
            limits=self._limits,
            selector=self._selector,
            outlet=self.caller.outlet,
            output=self.job.output,
            name=self.caller.name,
            where=where,
            restarts=restarts,
            drill=Drill(tasks, self.job.injections),
            attached=attached,
            directory=self.directory.path,
        )
        self.stack.callback(supervisor.close)
        supervisor.start()
        if self._listener is not None and not restarts.survivable(0):
            self._listener.close()  # otherwise the kernel would accept connections after the scheduler has died
        return supervisor
