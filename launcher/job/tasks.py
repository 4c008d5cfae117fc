"""The processes of a job, and the environment of each. No I/O.

`kvstore.job.contract` has what a process must know of its job. `member_variables` adds the user's variables, and
`render` makes whole environments for processes that inherit the caller's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvstore.job import contract, forking, processes, settings, threads
from kvstore.job.contract import Contract, Member, Role, member_name, member_title
from kvstore.job.curve_keys import Keyring
from kvstore.job.processes import Exit, signal_name, title
from launcher.errors import LaunchError, as_launch_error
from launcher.job.command import argv_of
from launcher.job.description import RESERVED, Job

# Every process of a job has this variable, so that it is found at the end even if it has left its session.
MARK = settings.JOB.name
AGENT = settings.AGENT.name  # likewise, for the processes that one agent has started
LOCAL_RANK, LOCAL_SIZE = settings.LOCAL_RANK.name, settings.LOCAL_SIZE.name
ROOT_FD = settings.ROOT_FD.name
# What a caller that is itself a member of a job, or has this exported, does not pass on.
_OWN = (
    *(ROOT_FD, settings.REPLICAS.name, settings.START.name, settings.INJECT.name),
    *(settings.LOST.name, settings.SCHEDULER_LOG.name, settings.READERS.name, settings.READER_KEY.name),
    settings.OBSERVER_KEY.name,
)


@dataclass(frozen=True)
class Rendezvous:
    """Where the members of a job meet."""

    uri: str  # the scheduler's host, or `ipc://` and a path
    port: int  # the scheduler's port; 0 with `ipc://`
    mark: str  # the name of the job, unique on this machine
    cluster: str = "local"
    node_host: str | None = "127.0.0.1"  # the address of all processes, if they have the same one
    fd: int | None = None  # a socket that listens at uri and port; the scheduler inherits it under this number
    keyring: Keyring | None = None  # the members' keys, if links are encrypted
    aggregated: Sequence[Sequence[int]] = ()  # for each aggregator, the ranks of its host's workers
    scheduler_log: str = ""  # the file with the scheduler's log, if it may be started again

    def contract(self, job: Job) -> Contract:
        root_fd = -1 if self.fd is None else self.fd
        return Contract(
            job.num_workers,
            job.num_servers,
            self.uri,
            self.port,
            self.mark,
            self.cluster,
            root_fd,
            self.keyring,
            self.aggregated,
            job.cluster.replicas,
            self.scheduler_log,
            job.cluster.max_readers if job.cluster.readers is not None else 0,
            job.cluster.min_workers,
            job.cluster.max_workers,
        )


@dataclass(frozen=True)
class Task:
    """One process to start.

    Args:
        env: its environment, which is not part of the repr because it may hold secrets. For a task on another host,
            the variables to add to the environment there.
    """

    role: Role  # the member of the job
    rank: int
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(repr=False)
    host: str = ""  # the host where it runs, if not this one

    @property
    def name(self) -> str:
        """Its name in output: `worker 0`, `standby 1`, `scheduler`."""
        return member_name(self.role, self.rank)

    @property
    def title(self) -> str:
        """Its name in errors: `worker 0 on node7`, `the standby of server 1`."""
        title = member_title(self.role, self.rank)
        return f"{title} on {self.host}" if self.host else title


@dataclass(frozen=True)
class HostEnvironment:
    """What processes on a host inherit from it.

    Args:
        source_root: the directory of the packages, if they are not installed; it goes last on PYTHONPATH.
    """

    environ: Mapping[str, str] = field(repr=False)
    python: str  # the interpreter that `python` in a command stands for
    cores: int  # the number of cores that the job shares
    shims: str | None = None  # the directory with `python` that goes first on the PATH of workers
    source_root: str | None = None


def members(job: Job, num_aggregators: int = 0) -> list[Member]:
    """Every member of a job, in the order in which to start them; see `kvstore.job.contract.members`."""
    return contract.members(job.num_workers, job.num_servers, num_aggregators, job.cluster.replicas)


def key_holders(job: Job, num_aggregators: int) -> list[Member]:
    """Every member that a job may have, also those that are added later: each needs keys from the start."""
    added: list[Member] = [("worker", rank) for rank in range(job.num_workers, job.cluster.max_workers)]
    return [*members(job, num_aggregators), *added]


def member_variables(job: Job, at: Rendezvous, role: Role, rank: int) -> dict[str, str]:
    """The variables of a member beside those that it inherits: the user's for its role, and the contract."""
    env = {} if at.node_host is None else {settings.NODE_HOST.name: at.node_host}
    if job.verbose:
        env[settings.VERBOSE.name] = "1"
    if job.cluster.trace is not None:
        env[settings.TRACE.name] = job.cluster.trace.rpartition(":")[2]
    if role != "scheduler":
        env.update(job.env_worker if role == "worker" else job.env_server)
    env.update(at.contract(job).variables(role, rank))
    faults = [f"{one.action}:{one.round}" for one in job.injections if one.member == (role, rank) and one.round]
    if faults:
        env[settings.INJECT.name] = ",".join(faults)
    return env


def passed(job: Job, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of the caller's environment that processes on other hosts get.

    These are the ones that the job names, and those that must be the same in all processes: the transport, and what is
    said of checkpoints.
    """
    same = settings.TRANSPORT, *settings.GROUPS["Checkpoints"]
    return {name: environ[name] for name in (*job.env_names, *(each.name for each in same)) if name in environ}


def outside_a_job(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if not name.startswith("DMLC_") and name not in RESERVED}


def again(start: int, how: Exit, when: float) -> dict[str, str]:
    """What the environment of a process that is started again has beside, or instead of, what it had.

    `start`: which start of it this is. `how`, `when`: how the one before has ended, and the monotonic time.
    """
    word = signal_name(how.signum) if how.signum else str(how)
    return {settings.START.name: str(start), settings.LOST.name: f"{word} {when:.3f}"}


def words(job: Job, role: Role, python: str, rank: int | None = None) -> tuple[str, ...]:
    """The words that a member of a role executes.

    `python`: the interpreter that `python` in the command stands for. `rank`: of the member, to be shown by `ps aux`;
    None where it does not run.
    """
    if role == "worker":
        return argv_of(job.command, python)
    return job.server_argv or our_servers(python, role, rank)


def our_servers(python: str, role: Role, rank: int | None) -> tuple[str, ...]:
    """The words that the scheduler, the servers and standbys execute by default, and aggregators always.

    The last one is for people: the process takes its role and rank from its environment.
    """
    named = () if rank is None else (title(role, rank),)
    return (*processes.words(python, "servers"), *named)


def forkable(tasks: Mapping[int, Task]) -> tuple[frozenset[int], dict[str, str]]:
    """Which tasks of a host one fork server makes, and its environment: `kvstore.job.forking.alike`."""
    roles = ("server", "standby", "aggregator")
    with as_launch_error():
        return forking.alike({i: (task.argv, task.env) for i, task in tasks.items() if task.role in roles})


def environment(
    around: HostEnvironment, role: Role, siblings: int, variables: Mapping[str, str], gpus: int = 0
) -> dict[str, str]:
    """The whole environment of a process, which inherits from its host, `around`, and gets these variables.

    `siblings`: the number of processes of that role on the host. `gpus`: the number of GPUs for each worker, chosen by
    its local rank; 0 leaves the choice to the program.
    """
    env = dict(around.environ)
    for name in _OWN:
        env.pop(name, None)
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

    env.update(threads.variables(env, role, around.cores, siblings))
    if around.shims is not None and role == "worker":
        env["PATH"] = os.pathsep.join([around.shims, env.get("PATH") or os.defpath])
    return processes.complete(env, around.source_root)


def render(job: Job, at: Rendezvous, around: HostEnvironment) -> list[Task]:
    return [rendered(job, at, around, role, rank) for role, rank in members(job)]


def rendered(job: Job, at: Rendezvous, around: HostEnvironment, role: Role, rank: int) -> Task:
    """The task of one member, or of a worker that is added to a job whose processes are all on this machine."""
    siblings = {"worker": job.num_workers, "server": job.num_servers, "standby": job.num_standbys, "scheduler": 1}
    locally = {LOCAL_RANK: str(rank), LOCAL_SIZE: str(max(siblings[role], rank + 1))}
    variables = member_variables(job, at, role, rank) | locally
    env = environment(around, role, siblings[role], variables, job.cluster.gpus_per_worker)
    return Task(role, rank, words(job, role, around.python, rank), env)
