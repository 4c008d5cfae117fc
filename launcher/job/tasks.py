"""The processes of a job and the environment of each. Pure: a job and an address in, tasks out.

`kvstore.job.contract` has what a process must know of its job. `member_variables` adds the user's variables, and
`render` makes whole environments for processes that inherit the caller's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvstore.job import contract, processes, settings
from kvstore.job.contract import Contract, Member, Role, member_name
from kvstore.job.keyring import Keyring
from launcher.errors import LaunchError
from launcher.job.command import argv_of
from launcher.job.description import Job

# Every process of a job carries this, so that even one that has left its session can be found at the end.
MARK = settings.JOB.name
AGENT = settings.AGENT.name  # the same, of those that one agent has started
LOCAL_RANK, LOCAL_SIZE = settings.LOCAL_RANK.name, settings.LOCAL_SIZE.name
ROOT_FD = settings.ROOT_FD.name


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
        keyring: the members' keys, where links are encrypted.
    """

    uri: str
    port: int
    mark: str
    cluster: str = "local"
    node_host: str | None = "127.0.0.1"
    fd: int | None = None
    keyring: Keyring | None = None

    def contract(self, job: Job) -> Contract:
        """What the members of that job are told."""
        root_fd = -1 if self.fd is None else self.fd
        return Contract(
            job.num_workers, job.num_servers, self.uri, self.port, self.mark, self.cluster, root_fd, self.keyring
        )


@dataclass(frozen=True)
class Task:
    """One process to start. Its environment is kept out of its repr: it may hold secrets.

    Args:
        role, rank: which member of the job it is.
        argv: the words to execute.
        env: its environment; for a task on another host, what is added to the environment there.
        host: where it runs, if not here.
    """

    role: Role
    rank: int
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(repr=False)
    host: str = ""

    @property
    def name(self) -> str:
        """How it is called in output: `worker 0`, `scheduler`."""
        return member_name(self.role, self.rank)

    @property
    def title(self) -> str:
        """How it is called in errors: `worker 0 on node7`."""
        return f"{self.name} on {self.host}" if self.host else self.name


@dataclass(frozen=True)
class HostEnvironment:
    """What processes on this machine inherit, and what rendering needs to know about it.

    Args:
        environ: the environment that is there.
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


def members(job: Job) -> list[Member]:
    """Every member of a job, in the order in which to start them: scheduler, servers, workers."""
    return contract.members(job.num_workers, job.num_servers)


def member_variables(job: Job, at: Rendezvous, role: Role, rank: int) -> dict[str, str]:
    """What a member's environment has beside what it inherits: the user's variables for its role, and the contract."""
    env = {} if at.node_host is None else {settings.NODE_HOST.name: at.node_host}
    env.update({"server": job.env_server, "worker": job.env_worker}.get(role, {}))
    env.update(at.contract(job).variables(role, rank))
    return env


def passed(job: Job, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of the caller's environment that go along to processes elsewhere.

    These are the ones that the job names, and the transport, which must be the same everywhere.
    """
    return {name: environ[name] for name in (*job.env_names, settings.TRANSPORT.name) if name in environ}


def words(job: Job, role: Role, python: str) -> tuple[str, ...]:
    """What a member of that role runs, where `python` is the interpreter of that path.

    Raises:
        LaunchError: the command cannot be understood.
    """
    if role == "worker":
        return argv_of(job.command, python)
    return job.server_argv or our_servers(python)


def our_servers(python: str) -> tuple[str, ...]:
    """What the scheduler and the servers run if the job does not say otherwise."""
    return processes.words(python, "servers")


def environment(
    around: HostEnvironment, role: Role, siblings: int, variables: Mapping[str, str], gpus: int = 0
) -> dict[str, str]:
    """The whole environment of a process.

    Args:
        around: where it starts.
        role: what it will be.
        siblings: how many of that role share the machine.
        variables: what it gets beside what it inherits.
        gpus: how many each worker gets, by its local rank; 0 leaves the choice to the program.

    Raises:
        LaunchError: there are not so many.
    """
    env = dict(around.environ)
    env.pop(ROOT_FD, None)
    env.update(variables)

    if role == "worker" and gpus:
        visible = env.get("CUDA_VISIBLE_DEVICES")
        first = int(env.get(LOCAL_RANK, "0")) * gpus
        devices = [str(n) for n in range(first + gpus)] if visible is None else list(filter(None, visible.split(",")))
        if len(devices) < first + gpus:
            wanted = f"GPU {first}" if gpus == 1 else f"GPUs {first} to {first + gpus - 1}"
            raise LaunchError(
                f"--gpus-per-worker {gpus}: a worker needs {wanted} of its host, counted from 0, but "
                f"CUDA_VISIBLE_DEVICES={visible} lists only {len(devices)}; use fewer workers on this host, or leave "
                "the option out where the cluster divides GPUs itself"
            )
        env["CUDA_VISIBLE_DEVICES"] = ",".join(devices[first : first + gpus])

    # A process per rank shares the machine: unless told, none takes more than its part of the cores.
    if role != "scheduler":
        env.setdefault(settings.OMP_NUM_THREADS.name, str(max(1, around.cores // max(1, siblings))))
    if around.shims is not None and role == "worker":
        env["PATH"] = os.pathsep.join([around.shims, env.get("PATH") or os.defpath])
    return processes.complete(env, around.source_root)


def render(job: Job, at: Rendezvous, around: HostEnvironment) -> list[Task]:
    """Every process of a job on one machine, in the order in which to start them.

    Raises:
        LaunchError: the command cannot be understood.
    """
    siblings = {"worker": job.num_workers, "server": job.num_servers, "scheduler": 1}
    return [
        Task(
            role,
            rank,
            words(job, role, around.python),
            environment(
                around,
                role,
                siblings[role],
                member_variables(job, at, role, rank) | {LOCAL_RANK: str(rank), LOCAL_SIZE: str(siblings[role])},
                job.cluster.gpus_per_worker,
            ),
        )
        for role, rank in members(job)
    ]
