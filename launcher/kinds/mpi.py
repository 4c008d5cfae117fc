"""The MPI launcher: one mpirun, of Open MPI or MPICH and its relatives, starts an agent for each process.

The processes of a job do not use MPI. mpirun only starts them, because it knows the hosts and how to reach them.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from launcher.agents import remote_run as agents
from launcher.agents.fleet import Carrier
from launcher.agents.links.link import ENLIST, AgentTicket
from launcher.agents.manager import ManagerRecruiter
from launcher.errors import NOT_FOUND, LaunchError
from launcher.hosts.hostfile import Host, read
from launcher.job import dryrun
from launcher.job.description import Job
from launcher.kinds.kind import (
    WITH_AGENTS,
    Kind,
    agent_words,
)
from launcher.processes.guard import LastWill
from launcher.supervision.supervisor import OnFailure

MPIRUN = "mpirun"
OPEN_MPI, MPICH = "Open MPI", "MPICH"
_VERSION_S = 20.0
# What mpirun's --version says, and which it then is; Intel's and MVAPICH's are MPICH's kin.
_SIGNS = (("Open MPI", OPEN_MPI), ("OpenRTE", OPEN_MPI), ("HYDRA", MPICH), ("MPICH", MPICH), ("Intel(R) MPI", MPICH))


def run(job: Job, on_failure: OnFailure) -> int:
    hosts = [] if job.cluster.hostfile is None else read(job.cluster.hostfile)
    flavor = detect()
    path = _write(hostfile(hosts, flavor)) if hosts else None

    def submit(ticket: AgentTicket) -> Carrier:
        return Carrier(
            MPIRUN, render(job, flavor, path), {**os.environ, ENLIST: ticket.text}, linked=False, source=MPIRUN
        )

    will = None if path is None else LastWill(remove=[Path(path)])
    toward = next((host.name for host in hosts if not host.here), "")
    try:
        return agents.run(job, on_failure, ManagerRecruiter(job, MPIRUN, submit, toward=toward), "mpi")
    finally:
        if path is not None and will is not None:
            will.revoke()
            with suppress(OSError):
                Path(path).unlink()


def dry_run(job: Job) -> str:
    hosts = [] if job.cluster.hostfile is None else read(job.cluster.hostfile)
    flavor = detect()
    lines = ["# scheduler: on this machine", f"# {flavor}, with {ENLIST}={dryrun.HIDDEN} in the environment:"]
    if hosts:
        lines += ["# hosts:", *(f"#   {line}" for line in hostfile(hosts, flavor).splitlines())]
    lines.append(shlex.join(render(job, flavor, "(hosts)" if hosts else None)))
    lines.append(dryrun.tasks(job, "mpi", job.python))
    return "\n".join(lines)


def detect() -> str:
    path = shutil.which(MPIRUN)
    if path is None:
        raise LaunchError(
            "--launcher mpi needs mpirun on PATH; on Debian and Ubuntu: apt-get install openmpi-bin", NOT_FOUND
        )
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=_VERSION_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{path} --version does not answer: {error}", exit_code=1) from None
    said = done.stdout + done.stderr
    for sign, flavor in _SIGNS:
        if sign in said:
            return flavor
    first = (said.strip().splitlines() or ["nothing"])[0]
    raise LaunchError(f"{path} is neither Open MPI's nor MPICH's; its --version prints: {first}")


def render(job: Job, flavor: str, hosts: str | None) -> list[str]:
    """The words of mpirun. They name the variable of the ticket, and not its value, which is a secret. No I/O.

    `flavor`: the MPI that mpirun belongs to. `hosts`: the path of the hostfile, in the syntax of that MPI; None for
    mpirun's own hosts.
    """
    count = str(job.num_placed)
    argv = [MPIRUN]
    if flavor == OPEN_MPI:
        # Without binding, so that a process gets its part of the host and not one core. Slots are for workers only, so
        # with servers there are more processes than slots.
        argv += ["-n", count, "--bind-to", "none", "--oversubscribe", "-x", ENLIST]
        argv += ["--hostfile", hosts] if hosts else []
    else:
        argv += ["-n", count, "-bind-to", "none", "-genvlist", ENLIST]
        argv += ["-f", hosts] if hosts else []
    argv += job.cluster.cluster_option
    return [*argv, *agent_words(job)]


def hostfile(hosts: Sequence[Host], flavor: str) -> str:
    """A hostfile in the syntax of an MPI. No I/O."""
    lines = []
    for host in hosts:
        if host.user or host.port:
            raise LaunchError(
                f"mpirun takes no user or port for {host.name}; put them into ~/.ssh/config, and its name alone here"
            )
        if flavor == OPEN_MPI:
            lines.append(host.name + ("" if host.slots is None else f" slots={host.slots}"))
        else:
            lines.append(host.name + ("" if host.slots is None else f":{host.slots}"))
    return "\n".join(lines) + "\n"


def _write(text: str) -> str:
    fd, path = tempfile.mkstemp(prefix="kvstore-hosts-")
    with os.fdopen(fd, "w") as file:
        file.write(text)
    return path


KIND = Kind(
    run=run,
    dry_run=dry_run,
    takes=WITH_AGENTS | {"hostfile", "cluster_option"},
)
