"""All processes of a job on this machine."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import sys
import sysconfig
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from launcher.child import cannot_start
from launcher.ending import Limits
from launcher.errors import LaunchError
from launcher.guard import Guard
from launcher.job import Job
from launcher.jobdir import JobDir
from launcher.signals import SignalQueue
from launcher.supervisor import OnFailure, Supervisor
from launcher.tasks import Rendezvous, Surroundings, Task, render

TRANSPORT = "KVSTORE_TRANSPORT"
_SPARE_FILES = 64


def ignore(task: Task, how: str) -> None:
    """Tell nobody of a failure."""


def run(
    job: Job,
    on_failure: OnFailure = ignore,
    *,
    environ: Mapping[str, str] | None = None,
    limits: Limits | None = None,
) -> int:
    """Run a job here, and wait for its end. Main thread only, because of the signals.

    Args:
        job: what to run.
        on_failure: called once, with the first process that fails and how, before the others are ended.
        environ: what the processes inherit; the caller's environment if None.
        limits: how long an ending may take.

    Returns:
        The exit code: 0, that of the first process to fail, or 128 + the signal that ended the job.

    Raises:
        LaunchError: the job could not be started. Nothing of it runs.
    """
    environ = dict(os.environ) if environ is None else environ
    _check(job)
    _open_standard_streams()
    with SignalQueue() as signals:
        directory = JobDir.make()
        try:
            guard = Guard(directory.path, directory.path.name)
            try:
                return _run(job, on_failure, environ, limits, signals, directory, guard)
            finally:
                directory.remove()
                guard.dismiss()
        finally:
            directory.remove()


def _run(
    job: Job,
    on_failure: OnFailure,
    environ: Mapping[str, str],
    limits: Limits | None,
    signals: SignalQueue,
    directory: JobDir,
    guard: Guard,
) -> int:
    listener = _listen() if environ.get(TRANSPORT, "").strip().lower() == "tcp" else None
    around = Surroundings(
        environ=environ,
        python=sys.executable,
        cores=cores(),
        shims=str(directory.shims(sys.executable)),
        source_root=source_root(),
    )
    tasks = render(job, _rendezvous(directory, listener), around)
    _check_command(tasks[-job.num_workers])
    pass_fds = {} if listener is None else {0: (listener.fileno(),)}
    supervisor = Supervisor(tasks, guard, signals, on_failure, pass_fds=pass_fds, environ=environ, limits=limits)
    try:
        supervisor.start()
        if listener is not None:
            listener.close()  # or the kernel would accept for a scheduler that has died
        _sweep_shared()
        return supervisor.run()
    finally:
        supervisor.close()


def _sweep_shared() -> None:
    """Remove the memory of jobs that were killed with everything that could have done it."""
    from kvstore.transport.presence import sweep  # only now, while the processes start

    sweep()


def cores() -> int:
    """How many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def source_root() -> str | None:
    """The directory that holds our packages if that is a clone; None if they are installed."""
    root = str(Path(__file__).resolve().parent.parent)
    installed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    return None if root in installed or os.pathsep in root else root


def _rendezvous(directory: JobDir, listener: socket.socket | None) -> Rendezvous:
    mark = directory.path.name
    if listener is None:
        return Rendezvous(uri=f"ipc://{directory.path}/scheduler", port=0, mark=mark)
    host, port = listener.getsockname()
    return Rendezvous(uri=host, port=port, mark=mark, fd=listener.fileno())


def _listen() -> socket.socket:
    """A socket that the scheduler takes over: a port that is free now might not be when it binds."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise LaunchError(f"cannot listen on 127.0.0.1: {error.strerror}", exit_code=1) from None
    return listener


def _check(job: Job) -> None:
    if job.hostfile is not None:
        raise LaunchError("--launcher local runs everything on this machine and takes no hostfile; leave out -H")
    if job.sync_dst_dir is not None:
        raise LaunchError("--launcher local copies nothing; leave out --sync-dst-dir")
    needed = 2 * (job.num_workers + job.num_servers + 1) + _SPARE_FILES
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if allowed != resource.RLIM_INFINITY and needed > allowed:
        raise LaunchError(f"so many processes need {needed} open files, and the limit is {allowed}: ulimit -n {needed}")


def _check_command(worker: Task) -> None:
    """Find out whether the command exists before anything runs."""
    program = worker.argv[0]
    if shutil.which(program, path=worker.env["PATH"]) is None:
        there = os.sep in program and Path(program).exists()
        raise cannot_start(worker, PermissionError(0, "is not executable") if there else FileNotFoundError())


def _open_standard_streams() -> None:
    """If one is closed, the next pipe would get its number, and our output would go there."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            with suppress(OSError):
                os.open(os.devnull, os.O_RDWR)
