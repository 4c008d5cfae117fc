"""The local launcher: all processes of a job run on this machine."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from kvstore.errors import ConfigError
from kvstore.job.processes import source_root
from kvstore.job.settings import COLUMNS, PATIENCE_S, TRANSPORT
from kvstore.job.system import cores
from launcher.errors import LaunchError
from launcher.job import dryrun
from launcher.job.description import Job
from launcher.job.tasks import HostEnvironment, Rendezvous, Task, members, render
from launcher.kinds.kind import SUPERVISED, Kind
from launcher.output.display import of_terminal
from launcher.output.outlet import Outlet
from launcher.processes.child import cannot_start
from launcher.processes.children import Children, Share, shared
from launcher.processes.companion import companions
from launcher.processes.guard import Guard
from launcher.processes.jobdir import JobDir
from launcher.processes.machine import in_foreground, open_standard_streams, require_files, terminal_kept
from launcher.processes.observers_file import readers_file, write_observers_file
from launcher.supervision.crew import Crew
from launcher.supervision.drill import Drill
from launcher.supervision.ending import EndingLimits
from launcher.supervision.restarts import Restarts
from launcher.supervision.signals import SignalQueue
from launcher.supervision.supervisor import OnFailure, Supervisor


def ignore(task: Task, how: str) -> None:
    """Do not report failures."""


class MakeCrew(Protocol):
    """Makes the crew of a job's tasks, as `Children` does."""

    def __call__(
        self,
        tasks: Mapping[int, Task],
        guard: Guard,
        *,
        pass_fds: Mapping[int, tuple[int, ...]] | None,
        shares: Mapping[int, Share] | None,
    ) -> Crew:
        """Make a crew of these tasks."""


@dataclass(frozen=True)
class Caller:
    """What runs the job: launch.py, or a script by `launcher.run`.

    Args:
        name: the prefix of its own lines.
        signals: the signals that end the job.
        outlet: where the output of the job's processes goes.
        crew: makes the crew that runs them.
        says_start: whether a line says what starts.
        gives_input: whether a worker may have the standard input of this process.
    """

    name: str = "launch.py"
    signals: SignalQueue = field(default_factory=SignalQueue)
    outlet: Outlet = field(default_factory=Outlet)
    crew: MakeCrew = Children
    says_start: bool = True
    gives_input: bool = True


def run(
    job: Job,
    on_failure: OnFailure = ignore,
    *,
    environ: Mapping[str, str] | None = None,
    limits: EndingLimits | None = None,
    caller: Caller | None = None,
) -> int:
    """Run a job on this machine, and wait for its end. Main thread only, because of launch.py's signals.

    Args:
        job: the job.
        on_failure: called once, with the first process that fails and how, before the others are ended.
        environ: the environment that the processes inherit; None for that of this process.
        limits: how long the phases of an ending may last.
        caller: what runs the job, if not launch.py.

    Returns:
        The exit code: 0, that of the first process to fail, or 128 + the signal that ended the job.

    Raises:
        LaunchError: the job cannot be started. None of its processes runs.
    """
    environ = dict(os.environ) if environ is None else environ
    require_files(2 * (job.num_placed + 1) + job.output.open_files(job.num_placed + 1))
    open_standard_streams()
    caller = Caller() if caller is None else caller
    if job.cluster.sync_dst_dir is not None:  # existing command lines for MXNet have it
        print(f"{caller.name}: --sync-dst-dir: nothing is copied: all processes run here", file=sys.stderr)
    with caller.signals:
        directory = JobDir.make()
        try:
            guard = Guard(directory.path, directory.path.name)
            try:
                return _run(job, on_failure, environ, limits, caller, directory, guard)
            finally:
                directory.remove()
                guard.dismiss()
        finally:
            directory.remove()


def dry_run(job: Job) -> str:
    """What `run` would start, one line for each process."""
    at = Rendezvous(uri="ipc://(a private directory)/scheduler", port=0, mark="(the directory's name)")
    lines = [dryrun.task(job, at, role, rank, sys.executable) for role, rank in members(job)]
    return "\n".join(["# on this machine, with the environment of launch.py and:", *lines])


def _run(
    job: Job,
    on_failure: OnFailure,
    environ: Mapping[str, str],
    limits: EndingLimits | None,
    caller: Caller,
    directory: JobDir,
    guard: Guard,
) -> int:
    listener = _listen() if _transport(environ) == "tcp" else None
    share = shared(job, in_foreground(), all(map(os.isatty, (0, 1, 2)))) if caller.gives_input else None
    told: dict[str, str] = of_terminal(caller.outlet, environ, job.output)
    if share is not None and share[1] is Share.ALL:
        # Others wait while somebody thinks at a prompt. And their bars would be drawn over it.
        told |= {PATIENCE_S.name: environ.get(PATIENCE_S.name, "0"), COLUMNS.name: "0"}
    around = HostEnvironment(
        environ={**environ, **told},
        python=sys.executable,
        cores=cores(),
        shims=str(directory.shims(sys.executable)),
        source_root=source_root(),
    )
    at = replace(_rendezvous(directory, listener), scheduler_log=directory.scheduler_log if job.restarts else "")
    write_observers_file(directory.path, job, at, environ)
    with readers_file(job, at, environ), companions(job, directory.path, environ) as beside:
        tasks = render(job, at, around)
        shares = {} if share is None else {len(tasks) - job.num_workers + share[0]: share[1]}
        with terminal_kept() if shares else nullcontext():
            return _run_tasks(job, tasks, on_failure, environ, limits, caller, guard, listener, beside, shares)


def _run_tasks(
    job: Job,
    tasks: list[Task],
    on_failure: OnFailure,
    environ: Mapping[str, str],
    limits: EndingLimits | None,
    caller: Caller,
    guard: Guard,
    listener: socket.socket | None,
    beside: Sequence[Crew],
    shares: Mapping[int, Share],
) -> int:
    _check_command(tasks[-job.num_workers])
    pass_fds = {} if listener is None else {0: (listener.fileno(),)}
    crew = caller.crew(dict(enumerate(tasks)), guard, pass_fds=pass_fds, shares=shares)
    restarts = Restarts.of(job, tasks)
    supervisor = Supervisor(
        tasks,
        [crew, *beside],
        caller.signals,
        on_failure,
        environ=environ,
        limits=limits,
        outlet=caller.outlet,
        output=job.output,
        name=caller.name,
        where="on this machine" if caller.says_start else None,
        restarts=restarts,
        drill=Drill(tasks, job.injections),
        attached=next((index for index, share in shares.items() if share is Share.ALL), None),
    )
    try:
        supervisor.start()
        if listener is not None and not restarts.survivable(0):
            listener.close()  # otherwise the kernel would accept connections after the scheduler has died
        _sweep_shared()
        return supervisor.run()
    finally:
        supervisor.close()
        if listener is not None:
            listener.close()


def _transport(environ: Mapping[str, str]) -> str:
    try:
        return TRANSPORT.read(environ)
    except ConfigError as error:
        raise LaunchError(str(error)) from None


def _sweep_shared() -> None:
    """Remove the shared memory of jobs that were killed together with their keepers."""
    from kvstore.transport.shm.presence import sweep  # imported late, while the processes start

    sweep()


def _rendezvous(directory: JobDir, listener: socket.socket | None) -> Rendezvous:
    mark = directory.path.name
    if listener is None:
        return Rendezvous(uri=f"ipc://{directory.path}/scheduler", port=0, mark=mark)
    host, port = listener.getsockname()
    return Rendezvous(uri=host, port=port, mark=mark, fd=listener.fileno())


def _listen() -> socket.socket:
    """The socket that the scheduler inherits. A port that is free now might not be when it starts."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise LaunchError(f"cannot listen on 127.0.0.1: {error.strerror}", exit_code=1) from None
    return listener


def _check_command(worker: Task) -> None:
    """Check that the command exists, before anything runs."""
    program = worker.argv[0]
    if shutil.which(program, path=worker.env["PATH"]) is None:
        exists = os.sep in program and Path(program).exists()
        raise cannot_start(worker, PermissionError(0, "is not executable") if exists else FileNotFoundError())


KIND = Kind(
    run=run,
    dry_run=dry_run,
    takes=SUPERVISED | {"sync_dst_dir", "attach"},
)
