"""The processes of a job and the environment of each. Pure: a job and an address in, tasks out.

The contract is MXNet's: a process finds its job by `DMLC_*` variables. `contract` computes just these, for launchers
that start processes elsewhere; `render` makes whole environments for processes that inherit the caller's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from launcher.command import argv_of
from launcher.job import Job

Role = Literal["scheduler", "server", "worker"]

# Every process of a job carries this, so that even one that has left its session can be found at the end.
MARK = "KVSTORE_JOB"
STREAM_BYTES = 1 << 20  # copies of so much go past the caches: a tenth to a fifth faster where memory is the limit
ROOT_FD = "KVSTORE_ROOT_FD"


@dataclass(frozen=True)
class Rendezvous:
    """Where the members of a job meet.

    Args:
        uri: the scheduler's host, or `ipc://` and a path.
        port: its port; 0 where the uri says all.
        mark: names the job, among all jobs of this machine.
        cluster: the kind of launcher.
        node_host: the address at which each process can be reached, where it is the same for all.
        fd: a socket that listens at uri and port, which the scheduler inherits under this number.
    """

    uri: str
    port: int
    mark: str
    cluster: str = "local"
    node_host: str | None = "127.0.0.1"
    fd: int | None = None


@dataclass(frozen=True)
class Task:
    """One process to start. Its environment is kept out of its repr: it may hold secrets."""

    role: Role
    rank: int
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(repr=False)

    @property
    def name(self) -> str:
        """How it is called in output and errors: `worker 0`, `scheduler`."""
        return self.role if self.role == "scheduler" else f"{self.role} {self.rank}"


@dataclass(frozen=True)
class Surroundings:
    """What processes on this machine inherit, and what rendering needs to know about it.

    Args:
        environ: the caller's environment.
        python: the interpreter that `python` means in a command.
        cores: how many processors the job may share.
        shims: a directory that goes first on the PATH of workers, where `python` is found.
        source_root: where the packages are, if they are not installed; it goes last on PYTHONPATH.
    """

    environ: Mapping[str, str] = field(repr=False)
    python: str
    cores: int
    shims: str | None = None
    source_root: str | None = None


def contract(job: Job, at: Rendezvous, role: Role, rank: int) -> dict[str, str]:
    """The variables that make a process that member of that job, and no others."""
    variables = {
        "DMLC_ROLE": role,
        "DMLC_TASK_ID": str(rank),
        "DMLC_NUM_WORKER": str(job.num_workers),
        "DMLC_NUM_SERVER": str(job.num_servers),
        "DMLC_PS_ROOT_URI": at.uri,
        "DMLC_PS_ROOT_PORT": str(at.port),
        "DMLC_JOB_CLUSTER": at.cluster,
        MARK: at.mark,
    }
    if at.fd is not None and role == "scheduler":
        variables[ROOT_FD] = str(at.fd)
    return variables


def render(job: Job, at: Rendezvous, around: Surroundings) -> list[Task]:
    """Every process of the job, in the order in which to start them: scheduler, servers, workers.

    Raises:
        LaunchError: the command cannot be understood.
    """
    command = argv_of(job.command, around.python)
    members: list[tuple[Role, int, tuple[str, ...]]] = [("scheduler", 0, job.server_argv)]
    members += [("server", rank, job.server_argv) for rank in range(job.num_servers)]
    members += [("worker", rank, command) for rank in range(job.num_workers)]
    return [Task(role, rank, argv, _environment(job, at, around, role, rank)) for role, rank, argv in members]


def _environment(job: Job, at: Rendezvous, around: Surroundings, role: Role, rank: int) -> dict[str, str]:
    env = dict(around.environ)
    env.pop(ROOT_FD, None)
    if at.node_host is not None:
        env["DMLC_NODE_HOST"] = at.node_host
    env.update({"server": job.env_server, "worker": job.env_worker}.get(role, {}))
    env.update(contract(job, at, role, rank))

    # A process per rank shares the machine: unless told, none takes more than its part of the cores.
    if role != "scheduler":
        siblings = job.num_workers if role == "worker" else job.num_servers
        env.setdefault("OMP_NUM_THREADS", str(max(1, around.cores // siblings)))
    # glibc takes the caches of the whole processor for this process's, and so never copies large arrays past them.
    env.setdefault("GLIBC_TUNABLES", f"glibc.cpu.x86_non_temporal_threshold={STREAM_BYTES:#x}")
    # Lines appear when they are printed, not when a pipe's buffer is full.
    env.setdefault("PYTHONUNBUFFERED", "1")

    if around.shims is not None and role == "worker":
        env["PATH"] = os.pathsep.join([around.shims, env.get("PATH") or os.defpath])
    if around.source_root is not None:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [env.get("PYTHONPATH"), around.source_root]))
    return env
