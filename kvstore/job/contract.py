"""What the starter of a job tells each of its members: MXNet's ``DMLC_*`` variables, the job's name, and the keys.

``launcher`` and ``bootstrap`` write these variables, ``config`` reads them. No I/O.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from kvstore.job import settings
from kvstore.job.curve_keys import READ_FROM, Keyring

Role = Literal["scheduler", "server", "standby", "aggregator", "worker"]
Member = tuple[Role, int]


def members(num_workers: int, num_servers: int, num_aggregators: int = 0, replicas: int = 0) -> list[Member]:
    """Every member of a job, in the order in which to start them; ``replicas``: the standbys of each server."""
    servers: list[Member] = [("server", rank) for rank in range(num_servers)]
    standbys: list[Member] = [("standby", rank) for rank in range(num_servers * replicas)]
    aggregators: list[Member] = [("aggregator", rank) for rank in range(num_aggregators)]
    workers: list[Member] = [("worker", rank) for rank in range(num_workers)]
    return [("scheduler", 0), *servers, *standbys, *aggregators, *workers]


def first_left(lost: Container[int]) -> int:
    """The worker that does what one does for all: worker 0 or, if that is ``lost``, the lowest rank that is not."""
    return next(rank for rank in itertools.count() if rank not in lost)


def aggregated(placed: Iterable[tuple[str, Sequence[Member]]]) -> list[list[int]]:
    """For each aggregator, return the ranks of its host's workers, in the order of the first ones."""
    workers: dict[str, list[int]] = {}
    for host, members in placed:
        workers.setdefault(host, []).extend(rank for role, rank in members if role == "worker")
    # On a single host, and for a single worker, an aggregator would be one more hop, and save no message.
    return sorted(sorted(ranks) for ranks in workers.values() if len(workers) > 1 and len(ranks) > 1)


def member_name(role: str, rank: int) -> str:
    """What output calls a member: ``worker 1``, ``standby 1``, ``scheduler``."""
    return role if role == "scheduler" else f"{role} {rank}"


def member_title(role: str, rank: int) -> str:
    """What errors and sentences call a member: ``worker 1``, ``the standby of server 1``, ``scheduler``."""
    return f"the standby of server {rank}" if role == "standby" else member_name(role, rank)


def process_name(role: str, rank: int, start: int) -> str:
    """One process of a member, which may be started several times, in reports: ``start 2 of server 1``."""
    return f"start {start} of {member_name(role, rank)}"


@dataclass(frozen=True)
class Contract:
    """A job as its members are told of it."""

    num_workers: int
    num_servers: int
    uri: str  # ``ipc://`` and a path, with port 0, on one host
    port: int
    job: str
    cluster: str = ""  # the launcher
    root_fd: int = -1  # a listening socket at that address, which the scheduler inherits
    keyring: Keyring | None = None
    aggregated: Sequence[Sequence[int]] = ()  # for each aggregator, the ranks of its host's workers
    replicas: int = 0  # of each server
    scheduler_log: str = ""
    readers: int = 0
    min_workers: int = 0
    max_workers: int = 0

    def variables(self, role: Role, rank: int) -> dict[str, str]:
        """The variables that make a process that member of the job, and no others."""
        variables = {
            settings.ROLE.name: role,
            settings.TASK_ID.name: str(rank),
            settings.NUM_WORKER.name: str(self.num_workers),
            settings.NUM_SERVER.name: str(self.num_servers),
            settings.ROOT_URI.name: self.uri,
            settings.ROOT_PORT.name: str(self.port),
            settings.JOB.name: self.job,
        }
        if self.aggregated:
            variables[settings.NUM_AGGREGATORS.name] = str(len(self.aggregated))
            if role == "worker":
                own = (aggregator for aggregator, ranks in enumerate(self.aggregated) if rank in ranks)
                variables[settings.AGGREGATOR.name] = str(next(own, -1))
        if self.replicas:
            variables[settings.REPLICAS.name] = str(self.replicas)
        if self.min_workers:
            variables[settings.MIN_WORKERS.name] = str(self.min_workers)
        if self.max_workers:
            variables[settings.MAX_WORKERS.name] = str(self.max_workers)
        if self.cluster:
            variables[settings.CLUSTER.name] = self.cluster
        if self.root_fd >= 0 and role == "scheduler":
            variables[settings.ROOT_FD.name] = str(self.root_fd)
        if self.scheduler_log and role == "scheduler":
            variables[settings.SCHEDULER_LOG.name] = self.scheduler_log
        if self.readers and role in READ_FROM:
            variables[settings.READERS.name] = str(self.readers)
        if self.keyring is not None:
            variables.update(self.keyring.variables(role, rank))
        return variables


# What of these is computed for each process, and so can be set by nobody.
COMPUTED = frozenset(
    setting.name
    for setting in (
        *(settings.ROLE, settings.TASK_ID, settings.NUM_WORKER, settings.NUM_SERVER),
        *(settings.ROOT_URI, settings.ROOT_PORT, settings.JOB, settings.CLUSTER, settings.ROOT_FD),
        *(settings.NUM_AGGREGATORS, settings.AGGREGATOR, settings.REPLICAS, settings.MIN_WORKERS, settings.MAX_WORKERS),
        settings.START,
        *(settings.LOST, settings.SCHEDULER_LOG, settings.READERS, settings.READER_KEY),
        *(settings.SECRET_KEY, settings.ROOT_KEY, settings.MEMBER_KEYS, settings.OBSERVER_KEY),
    )
)
