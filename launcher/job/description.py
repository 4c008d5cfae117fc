"""What the user asked for, before anything is known about where it will run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from kvstore.job import settings
from kvstore.job.contract import COMPUTED
from launcher.errors import LaunchError
from launcher.job.cluster import Cluster

# A typing error must not become a fork bomb.
MAX_PER_ROLE = 1024

# The variables by which members of a job, and its agents, find each other. Nobody may set them by option.
RESERVED = COMPUTED | {settings.AGENT.name}


def _nothing() -> Mapping[str, str]:
    return MappingProxyType({})


@dataclass(frozen=True)
class Job:
    """One distributed job, the same for every kind of cluster.

    Args:
        num_workers: how many copies of `command` to run.
        num_servers: how many servers to run beside the one scheduler.
        command: the user's command, as it stood on the command line: one quoted string, or separate words.
        env_server: variables for the servers alone.
        env_worker: variables for the workers alone.
        env_names: variables of the caller's environment that go along to every process. A local job inherits them all;
            clusters that start processes elsewhere send just these.
        cluster: where it runs.
        server_argv: what the scheduler and the servers run, if it is not ours; `DMLC_ROLE` tells them which they are.

    Raises:
        LaunchError: the description makes no sense.
    """

    num_workers: int
    num_servers: int
    command: tuple[str, ...]
    env_server: Mapping[str, str] = field(default_factory=_nothing, repr=False)
    env_worker: Mapping[str, str] = field(default_factory=_nothing, repr=False)
    env_names: tuple[str, ...] = ()
    cluster: Cluster = field(default_factory=Cluster)
    server_argv: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for what, count in (("workers", self.num_workers), ("servers", self.num_servers)):
            if not 1 <= count <= MAX_PER_ROLE:
                raise LaunchError(f"{count} {what} are not possible; valid: 1 to {MAX_PER_ROLE}")
        if not any(word.strip() for word in self.command):
            raise LaunchError("the command is missing; put it last: launch.py -n 2 python train.py")
        for option, names in (("--env-server", self.env_server), ("--env-worker", self.env_worker)):
            for name in sorted(RESERVED.intersection(names)):
                raise LaunchError(f"{option} cannot set {name}: launch.py computes it for each process")
