"""The local launcher: all processes of a job run on this machine."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from functools import partial

from kvstore.job.processes import source_root
from kvstore.job.settings import COLUMNS, PATIENCE_S, TRANSPORT
from kvstore.job.system import cores
from launcher.errors import LaunchError, as_launch_error
from launcher.job import dryrun
from launcher.job.description import Job
from launcher.job.tasks import HostEnvironment, Rendezvous, Task, members, render, rendered
from launcher.kinds.kind import SUPERVISED, Kind
from launcher.output.display import of_terminal
from launcher.processes.child import require_command
from launcher.processes.children import Share, shared
from launcher.processes.job_run import Caller, JobRun
from launcher.processes.machine import in_foreground, open_standard_streams, require_files, terminal_kept
from launcher.supervision.ending import EndingLimits
from launcher.supervision.supervisor import OnFailure


def ignore(task: Task, how: str) -> None:
    """Do not report failures."""


def run(
    job: Job,
    on_failure: OnFailure = ignore,
    *,
    environ: Mapping[str, str] | None = None,
    limits: EndingLimits | None = None,
    caller: Caller | None = None,
) -> int:
    """Run a job on this machine, and wait for its end. Main thread only, because of launch.py's signals.

    `environ`: the environment that the processes inherit; None for that of this process. `limits`: how long the phases
    of an ending may last. `caller`: what runs the job, if not launch.py. Returns the exit code, as a `Kind` does.
    """
    environ = dict(os.environ) if environ is None else environ
    job.check_max_workers()
    processes = job.num_placed + 1 + max(0, job.cluster.max_workers - job.num_workers)
    require_files(2 * processes + job.output.open_files(processes))
    open_standard_streams()
    caller = Caller() if caller is None else caller
    if job.cluster.sync_dst_dir is not None:  # existing command lines for MXNet have it
        print(f"{caller.name}: --sync-dst-dir: nothing is copied: all processes run here", file=sys.stderr)
    with caller.signals, JobRun(job, on_failure, environ, limits, caller) as running:
        with as_launch_error():
            transport = TRANSPORT.read(environ)
        at = running.meet(_listen() if transport == "tcp" else None)
        share = shared(job, in_foreground(), all(map(os.isatty, (0, 1, 2)))) if caller.gives_input else None
        told: dict[str, str] = of_terminal(caller.outlet, environ, job.output)
        if share is not None and share[1] is Share.ALL:
            # Others wait while somebody thinks at a prompt. And their bars would be drawn over it.
            told |= {PATIENCE_S.name: environ.get(PATIENCE_S.name, "0"), COLUMNS.name: "0"}
        around = HostEnvironment(
            environ={**environ, **told},
            python=sys.executable,
            cores=cores(),
            shims=str(running.directory.shims(sys.executable)),
            source_root=source_root(),
        )
        tasks = render(job, at, around)
        shares = {} if share is None else {len(tasks) - job.num_workers + share[0]: share[1]}
        if shares:
            running.stack.enter_context(terminal_kept())
        require_command(tasks[-job.num_workers])
        added = {"worker": partial(rendered, job, at, around, "worker")} if job.cluster.max_workers else {}
        crew = caller.crew(
            dict(enumerate(tasks)), running.guard, pass_fds=running.scheduler_fds, shares=shares, **added
        )
        attached = next((index for index, part in shares.items() if part is Share.ALL), None)
        supervisor = running.start(tasks, [crew], "on this machine" if caller.says_start else None, attached)
        _sweep_shared()
        return supervisor.run()


def dry_run(job: Job) -> str:
    at = Rendezvous(uri="ipc://(a private directory)/scheduler", port=0, mark="(the directory's name)")
    lines = [dryrun.task(job, at, role, rank, sys.executable) for role, rank in members(job)]
    return "\n".join(["# on this machine, with the environment of launch.py and:", *lines])


def _sweep_shared() -> None:
    from kvstore.transport.shm.presence import sweep  # imported late, while the processes start

    sweep()


def _listen() -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise LaunchError(f"cannot listen on 127.0.0.1: {error.strerror}", exit_code=1) from None
    return listener


KIND = Kind(
    run=run,
    dry_run=dry_run,
    takes=SUPERVISED | {"max_workers", "sync_dst_dir", "attach"},
)
