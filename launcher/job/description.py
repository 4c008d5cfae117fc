"""The job that the user has asked for, before it is known where each process will run. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from kvstore.job import settings
from kvstore.job.contract import COMPUTED, members
from launcher.errors import LaunchError
from launcher.job.cluster import Cluster
from launcher.job.injection import Injection
from launcher.job.output_options import OutputOptions

# A typing error must not start a million processes.
MAX_PER_ROLE = settings.MAX_NODES

# The variables by which the members of a job, and its agents, find each other. Options cannot set them.
RESERVED = COMPUTED | {settings.AGENT.name, settings.EXIT_REPORT.name, settings.INJECT.name}

# With standbys, processes are started again so many times. The delays between them keep a loop from doing harm.
RESTARTS = 100


def _nothing() -> Mapping[str, str]:
    return MappingProxyType({})


@dataclass(frozen=True)
class Job:
    """One distributed job, the same for every kind of cluster.

    Args:
        num_workers: the number of workers; each runs `command`.
        num_servers: the number of servers. A job has one scheduler.
        command: the user's command as given on the command line: one quoted string, or separate words.
        env_server: environment variables for the servers and the aggregators only.
        env_worker: environment variables for the workers only.
        env_names: names of variables to pass from the caller's environment to every process. A local job inherits all
            of them; other launchers pass only these.
        cluster: where the job runs.
        server_argv: the command of the scheduler and the servers, if not `python -m servers`. `DMLC_ROLE` tells the
            process which of them it is. A job with such a command has no aggregators.
        verbose: whether every process prints its whole traceback at once if the job fails.
        output: what is done with the lines that the processes print.

    Raises:
        LaunchError: a number is out of range, the command is empty, or a variable is reserved.
    """

    num_workers: int
    num_servers: int
    command: tuple[str, ...]
    env_server: Mapping[str, str] = field(default_factory=_nothing, repr=False)
    env_worker: Mapping[str, str] = field(default_factory=_nothing, repr=False)
    env_names: tuple[str, ...] = ()
    cluster: Cluster = field(default_factory=Cluster)
    server_argv: tuple[str, ...] = ()
    verbose: bool = False
    output: OutputOptions = field(default_factory=OutputOptions)

    def __post_init__(self) -> None:
        for what, count in (("workers", self.num_workers), ("servers", self.num_servers)):
            if not isinstance(count, int) or not 1 <= count <= MAX_PER_ROLE:
                raise LaunchError(f"{count!r} {what} are not possible; valid: 1 to {MAX_PER_ROLE}")
        if not any(word.strip() for word in self.command):
            raise LaunchError("the command is missing; put it last: launch.py -n 2 python train.py")
        for option, names in (("--env-server", self.env_server), ("--env-worker", self.env_worker)):
            for name in sorted(RESERVED.intersection(names)):
                raise LaunchError(f"{option} cannot set {name}: launch.py computes it for each process")
        self.output.require_ranks(self.num_workers)
        self._require_attachable()
        known = set(members(self.num_workers, self.num_servers, replicas=self.cluster.replicas))
        for text in self.cluster.inject:
            if Injection.parse(text).member not in known:
                raise LaunchError(
                    f"--inject {text}: the job has no such member; it has {self.num_workers} workers, "
                    f"{self.num_servers} servers and {self.num_standbys} standbys (--replicas), and ranks begin at 0"
                )

    def _require_attachable(self) -> None:
        attach = self.cluster.attach
        if attach is None:
            return
        if attach >= self.num_workers:
            ranks = "rank is 0" if self.num_workers == 1 else f"ranks are 0 to {self.num_workers - 1}"
            raise LaunchError(f"--attach {attach}: there is no worker {attach}; the workers' {ranks}")
        if self.output.live:
            raise LaunchError("--attach gives the terminal to a worker, and --live draws on it; leave one of them out")

    @property
    def num_standbys(self) -> int:
        """How many standbys the servers have in all."""
        return self.num_servers * self.cluster.replicas

    @property
    def num_placed(self) -> int:
        """How many processes need a place on a host of the job: the workers, the servers and their standbys."""
        return self.num_workers + self.num_servers + self.num_standbys

    @property
    def injections(self) -> list[Injection]:
        """The faults to inject."""
        return [Injection.parse(text) for text in self.cluster.inject]

    @property
    def restarts(self) -> int:
        """How many times processes that die are started again, in all."""
        if self.cluster.restarts is not None:
            return self.cluster.restarts
        return RESTARTS if self.cluster.replicas else 0

    @property
    def aggregates(self) -> bool:
        """Whether hosts with several workers have aggregators."""
        return self.cluster.host_aggregation and not self.server_argv
