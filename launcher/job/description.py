"""The job that the user has asked for, with all options, before it is known where each process will run. No I/O."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import cast

from kvstore.job import settings
from kvstore.job.contract import COMPUTED, Member, Role, member_title, members
from launcher.errors import LaunchError

# A typing error must not start a million processes.
MAX_PER_ROLE = settings.MAX_NODES

# The variables by which the members of a job, and its agents, find each other. Options cannot set them.
RESERVED = COMPUTED | {settings.AGENT.name, settings.EXIT_REPORT.name, settings.INJECT.name}

# With standbys, processes are started again so many times. The delays between them keep a loop from doing harm.
RESTARTS = 100


PLACEMENTS = ("fill", "round-robin")


LOG_SIZE = 16 << 20  # bytes of one file
LOG_FILES = 4  # of one process
_VALID = "all, none, or ranks of workers such as 0, 0,2 or 0,4-7"
_LARGEST = 9  # digits


# What is done to a process. A stopped one is alive, and says nothing, until it is continued.
ACTIONS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "cont": signal.SIGCONT}
ROLES = ("scheduler", "server", "standby", "worker")

_FAULT_SYNTAX = re.compile(r"(\w+):(\w+)(?::(\d{1,9}))?@(?:round:([1-9]\d{0,8})|(\d{1,9}(?:\.\d{1,9})?)s)", re.ASCII)
_VALID_FAULT = "ACTION:ROLE:RANK@WHEN, such as kill:server:1@round:100, stop:standby:0@10s or kill:scheduler@5s"


@dataclass(frozen=True)
class Injection:
    """One fault."""

    action: str
    role: Role  # the member whose process it happens to
    rank: int
    round: int | None = None  # when that process has so many rounds; None for a time
    after_s: float | None = None  # when the job has run for so many seconds; None for a round

    @classmethod
    def parse(cls, text: str) -> Injection:
        match = _FAULT_SYNTAX.fullmatch(text)
        if match is None:
            raise LaunchError(f"--inject {text}: expected {_VALID_FAULT}")
        action, role, rank, rounds, seconds = match.groups()
        if action not in ACTIONS:
            raise LaunchError(f"--inject {text}: there is no action {action}; valid: {', '.join(ACTIONS)}")
        if role not in ROLES:
            raise LaunchError(f"--inject {text}: there is no role {role}; valid: {', '.join(ROLES)}")
        if (rank is None) != (role == "scheduler"):
            raise LaunchError(f"--inject {text}: a {role} has {'no' if rank else 'a'} rank; expected {_VALID_FAULT}")
        if rounds is not None and (role not in ("server", "standby") or action == "cont"):
            why = "a stopped process sees no round" if action == "cont" else f"a {role} counts no rounds"
            raise LaunchError(f"--inject {text}: {why}; give a time, such as {action}:{role}{_colon(rank)}@10s")
        return cls(
            action,
            cast(Role, role),
            int(rank or 0),
            None if rounds is None else int(rounds),
            None if seconds is None else float(seconds),
        )

    @property
    def member(self) -> Member:
        return self.role, self.rank

    @property
    def signal(self) -> signal.Signals:
        return ACTIONS[self.action]

    def __str__(self) -> str:
        when = f"{self.after_s:g} s after the start" if self.round is None else f"at its round {self.round}"
        return f"{self.signal.name} for {member_title(self.role, self.rank)}, {when}"


def _colon(rank: str | None) -> str:
    return "" if rank is None else f":{rank}"


@dataclass(frozen=True)
class OutputOptions:
    """Options of launch.py for what the processes print, as `launcher.cli` explains them."""

    log_dir: str | None = None
    log_size: int = LOG_SIZE
    log_files: int = LOG_FILES
    show: tuple[int, ...] | None = None

    def open_files(self, num_processes: int) -> int:
        return num_processes + 2 if self.log_dir is not None else 0

    def shows(self, role: str, rank: int) -> bool:
        """Whether the lines of a member are shown."""
        return role != "worker" or self.show is None or rank in self.show


def parse_ranks(text: str) -> tuple[int, ...] | None:
    """The ranks that `--show` names, in order; None for all.

    Raises ValueError: the text is not valid. The message says what is.
    """
    if text in ("all", "none"):
        return None if text == "all" else ()
    ranks: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not _is_rank(first) or (dash and not _is_rank(last)):
            raise ValueError(f"{part!r} is not a rank; valid: {_VALID}")
        if dash and int(last) < int(first):
            raise ValueError(f"{part} ends before it begins; valid: {_VALID}")
        if int(last or first) - int(first) >= 1 << 16:
            raise ValueError(f"{part} are too many workers; valid: {_VALID}")
        ranks.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(ranks))


def _is_rank(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _LARGEST


@dataclass(frozen=True)
class Cluster:
    """Options of launch.py that depend on the launcher. Each launcher takes some; the others must keep their defaults.

    Each field is the option of its name, which `launcher.cli` explains. None, 0 and empty text are the default, but for
    `dashboard`: port 0 is any free port.
    """

    hostfile: str | None = None
    server_hosts: str | None = None
    placement: str = "fill"
    sync_dst_dir: str | None = None
    sync_exclude: tuple[str, ...] = ()
    sync_gitignore: bool = False
    ssh_config: str | None = None
    ssh_option: tuple[str, ...] = ()
    python: str = ""
    host_ip: str = ""
    interface: str = ""
    encryption: bool = True
    host_aggregation: bool = True
    replicas: int = 0
    min_workers: int = 0
    max_workers: int = 0
    restarts: int | None = None
    readers: str | None = None
    max_readers: int = 64
    dashboard: int | None = None
    dashboard_token_file: str | None = None
    trace: str | None = None
    attach: int | None = None
    inject: tuple[str, ...] = ()
    job_name: str = "kvstore"
    queue: str = ""
    time: str = ""
    worker_cores: int = 0
    server_cores: int = 0
    worker_memory: str = ""
    server_memory: str = ""
    gpus_per_worker: int = 0
    cluster_option: tuple[str, ...] = ()
    image: str = ""
    namespace: str = ""
    yarn_jar: str = ""

    def given(self) -> list[str]:
        return [field.name for field in fields(self) if getattr(self, field.name) != field.default]


def option(field: str) -> str:
    switched_off = getattr(Cluster, field) is True
    return f"--{'no-' if switched_off else ''}{field.replace('_', '-')}"


def _nothing() -> Mapping[str, str]:
    return MappingProxyType({})


@dataclass(frozen=True)
class Job:
    """One distributed job, the same for every kind of cluster.

    Args:
        env_server: environment variables for the servers and the aggregators only.
        env_worker: environment variables for the workers only.
        env_names: names of variables to pass from the caller's environment to every process. A local job inherits all
            of them; other launchers pass only these.
        server_argv: the command of the scheduler and the servers, if not `python -m servers`. `DMLC_ROLE` tells the
            process which of them it is. A job with such a command has no aggregators.
    """

    num_workers: int  # the number of workers; each runs `command`
    num_servers: int  # the number of servers. A job has one scheduler
    command: tuple[str, ...]  # the user's command as given on the command line: one quoted string, or separate words
    env_server: Mapping[str, str] = field(default_factory=_nothing, repr=False)
    env_worker: Mapping[str, str] = field(default_factory=_nothing, repr=False)
    env_names: tuple[str, ...] = ()
    cluster: Cluster = field(default_factory=Cluster)  # where the job runs
    server_argv: tuple[str, ...] = ()
    verbose: bool = False  # whether every process prints its whole traceback at once if the job fails
    output: OutputOptions = field(default_factory=OutputOptions)  # what is done with the lines that the processes print

    def __post_init__(self) -> None:
        for what, count in (("workers", self.num_workers), ("servers", self.num_servers)):
            if not isinstance(count, int) or not 1 <= count <= MAX_PER_ROLE:
                raise LaunchError(f"{count!r} {what} are not possible; valid: 1 to {MAX_PER_ROLE}")
        if not any(word.strip() for word in self.command):
            raise LaunchError("the command is missing; put it last: launch.py -n 2 python train.py")
        for option, names in (("--env-server", self.env_server), ("--env-worker", self.env_worker)):
            for name in sorted(RESERVED.intersection(names)):
                raise LaunchError(f"{option} cannot set {name}: launch.py computes it for each process")
        for rank in self.output.show or ():
            self._require_worker("--show", rank)
        if self.cluster.attach is not None:
            self._require_worker("--attach", self.cluster.attach)
        if not 0 <= self.cluster.min_workers <= self.num_workers:
            raise LaunchError(
                f"--min-workers {self.cluster.min_workers}: the job has {self.num_workers} workers (-n); valid: 1 to "
                f"{self.num_workers}, or 0 if the death of any worker is to end the job"
            )
        known = set(members(self.num_workers, self.num_servers, replicas=self.cluster.replicas))
        for text in self.cluster.inject:
            if Injection.parse(text).member not in known:
                raise LaunchError(
                    f"--inject {text}: the job has no such member; it has {self.num_workers} workers, "
                    f"{self.num_servers} servers and {self.num_standbys} standbys (--replicas), and ranks begin at 0"
                )

    def check_max_workers(self) -> None:
        """Raise `LaunchError` if workers are to be added to a job that cannot take them."""
        most = self.cluster.max_workers
        if not most:
            return
        if not self.num_workers <= most <= MAX_PER_ROLE or self.num_workers < 2:
            raise LaunchError(
                f"--max-workers {most}: the job begins with {self.num_workers} workers (-n), which must be 2 or more; "
                f"valid: {max(2, self.num_workers)} to {MAX_PER_ROLE}"
            )
        if not self.cluster.min_workers:
            raise LaunchError(f"--max-workers {most} needs --min-workers: workers come only to a job that goes on")

    def _require_worker(self, option: str, rank: int) -> None:
        if rank >= self.num_workers:
            ranks = "rank is 0" if self.num_workers == 1 else f"ranks are 0 to {self.num_workers - 1}"
            raise LaunchError(f"{option} {rank}: there is no worker {rank}; the workers' {ranks}")

    @property
    def python(self) -> str:
        """The path of the interpreter on the hosts."""
        return self.cluster.python or sys.executable

    @property
    def num_standbys(self) -> int:
        return self.num_servers * self.cluster.replicas

    @property
    def num_placed(self) -> int:
        return self.num_workers + self.num_servers + self.num_standbys

    @property
    def injections(self) -> list[Injection]:
        return [Injection.parse(text) for text in self.cluster.inject]

    @property
    def restarts(self) -> int:
        if self.cluster.restarts is not None:
            return self.cluster.restarts
        return RESTARTS if self.cluster.replicas else 0

    @property
    def aggregates(self) -> bool:
        """Whether hosts with several workers have aggregators."""
        return self.cluster.host_aggregation and not self.server_argv
