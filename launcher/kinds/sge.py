"""The Grid Engine launcher: one array job, with an agent for each of its tasks.

The agents find launch.py by a ticket in a file that only this user can read. It is in a directory of the job in the
working directory, which must be on a file system that all hosts share, as is usual with Grid Engine. Grid Engine shows
the script to all users, so the script has only the path of the ticket.
"""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
from contextlib import suppress
from pathlib import Path

from launcher.agents import remote_run as agents
from launcher.agents.fleet import Carrier
from launcher.agents.links.link import ENLIST, AgentTicket
from launcher.agents.manager import ManagerRecruiter
from launcher.errors import LaunchError
from launcher.job import dryrun
from launcher.job.description import Job
from launcher.kinds.kind import (
    WITH_AGENTS,
    Kind,
    agent_words,
    largest_memory,
    require,
    tell,
    write_private,
)
from launcher.processes.guard import LastWill
from launcher.supervision.supervisor import OnFailure

QSUB = "qsub"


def run(job: Job, on_failure: OnFailure) -> int:
    require("sge", QSUB, "run launch.py on a submit host")
    name = f"{job.cluster.job_name}-{secrets.token_hex(4)}"
    directory = _directory(name)
    cancel = ("qdel", name)
    will = LastWill(cancel, [directory])

    def submit(ticket: AgentTicket) -> Carrier:
        path = directory / "ticket"
        write_private(path, ticket.text + "\n")
        (directory / "script").write_text(script(job, str(path)))
        words = qsub(job, name, directory.name)
        return Carrier(QSUB, words, dict(os.environ), linked=False, source=QSUB)

    recruiter = ManagerRecruiter(job, QSUB, submit, patience_s=None, cancel=lambda: tell(cancel))
    try:
        return agents.run(job, on_failure, recruiter, "sge")
    except LaunchError as error:
        raise LaunchError(f"{error}{_said(directory)}", error.exit_code) from None
    finally:
        will.revoke()
        shutil.rmtree(directory, ignore_errors=True)


def dry_run(job: Job) -> str:
    directory = ".kvstore-job"
    return "\n".join(
        [
            "# scheduler: on this machine",
            shlex.join(qsub(job, job.cluster.job_name, directory)),
            f"# with this as {directory}/script:",
            script(job, str(Path.cwd() / directory / "ticket")).rstrip(),
            dryrun.tasks(job, "sge", job.python),
        ]
    )


def qsub(job: Job, name: str, directory: str) -> list[str]:
    """The words that submit the job and wait for its end. No I/O.

    `directory`: the directory of its script, where errors before the agents start are written. It is relative to the
    working directory: in an absolute path, Grid Engine would look for variables and host names.
    """
    cluster = job.cluster
    argv = [QSUB, "-sync", "y", "-cwd", "-N", name, "-t", f"1-{job.num_placed}"]
    argv += ["-S", "/bin/sh", "-j", "y", "-o", directory, "-r", "n"]
    if cluster.queue:
        argv += ["-q", cluster.queue]
    limits = []
    if cluster.time:
        limits.append(f"h_rt={cluster.time}")
    if memory := largest_memory(cluster):
        limits.append(f"h_vmem={memory.upper()}")
    if limits:
        argv += ["-l", ",".join(limits)]
    return [*argv, *cluster.cluster_option, f"{directory}/script"]


def script(job: Job, ticket: str) -> str:
    """The script of each task: an agent that reads its ticket from a file. No I/O."""
    agent = shlex.join(agent_words(job))
    return f'#!/bin/sh\n{ENLIST}="$(cat {shlex.quote(ticket)})" || exit 1\nexport {ENLIST}\nexec {agent}\n'


def _directory(name: str) -> Path:
    directory = Path.cwd() / f".{name}"
    try:
        directory.mkdir(mode=0o700)
    except OSError as error:
        raise LaunchError(f"cannot make {directory} for the job's files: {error.strerror}", exit_code=1) from None
    return directory


def _said(directory: Path) -> str:
    """The output of tasks that have not become agents."""
    for path in sorted(directory.glob("*.o*")):
        with suppress(OSError):
            if text := path.read_text(errors="replace").strip():
                return f"; a task has printed: {text[-500:]}"
    return ""


KIND = Kind(
    run=run,
    dry_run=dry_run,
    takes=WITH_AGENTS | {"job_name", "queue", "time", "worker_memory", "server_memory", "cluster_option"},
)
