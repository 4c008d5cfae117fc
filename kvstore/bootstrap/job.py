"""From ranks to a job: rank 0 starts it and tells the others its address; then all can join.

If the ranks are on several hosts, rank 0 first hears on which. A host with two of them or more gets an aggregator,
which the first of them starts.
"""

from __future__ import annotations

import atexit
import contextlib
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvstore.bootstrap.job_address import JobAddress, require_safe
from kvstore.bootstrap.job_servers import JobServers, start_aggregator
from kvstore.bootstrap.meeting import FileMeeting, meeting, on_one_host
from kvstore.bootstrap.member_processes import MemberProcesses
from kvstore.errors import ConfigError
from kvstore.job.config import Config, inherited
from kvstore.job.contract import Member, aggregated
from kvstore.job.directory import require_private
from kvstore.job.ranks import Ranks
from kvstore.job.settings import REPLICAS

BOOT = Path("/proc/sys/kernel/random/boot_id")  # tells machines of one name apart


@contextlib.contextmanager
def joining(config: Config) -> Iterator[Config]:
    """The settings with which a process joins its job, as a context that lasts while it joins.

    These are ``config`` if it has the job's address, or if no starter has given this process a rank. Otherwise rank 0's
    process starts the job's scheduler and servers. They end when all workers have left, which rank 0 waits for at its
    exit, when the job fails, or when rank 0's process dies. So does an aggregator with the rank that has started it.

    Raises:
        ConfigError: the ranks cannot meet, or not safely, or the job is to have standbys; the message says what to do.
        DeadlineExceeded: rank 0 has not told the address in time, or has not heard of all other ranks.
    """
    ranks = config.ranks
    if ranks is None:
        yield config
        return
    if config.replicas:
        raise ConfigError(
            f"{REPLICAS.name}={config.replicas}: torchrun, mpirun and srun alone start servers without standbys, and "
            "nothing that dies again; start the job with launch.py --replicas 1, or unset the variable"
        )
    one_host = on_one_host(ranks)
    with meeting(ranks, config.join_limit_s) as met:
        secret = require_safe(config, one_host)
        if ranks.rank != 0:
            if not one_host:
                met.introduce(_host(config))
            address = JobAddress.loads(met.hear())
            settings = _settings(address, ranks, one_host, secret)
            with _lasting(start_aggregator(config, address, ranks, secret)):
                yield settings
            return
        aggregated = [] if one_host else _aggregated([_host(config), *met.hosts()])
        remove = met.path if isinstance(met, FileMeeting) else None
        servers = JobServers(config, ranks, one_host, secret, remove, aggregated)
        with _lasting(servers):
            try:
                met.tell(servers.address.dumps())
                yield _settings(servers.address, ranks, one_host, secret)
            finally:
                met.forget()


@contextlib.contextmanager
def _lasting(processes: JobServers | MemberProcesses | None) -> Iterator[None]:
    """Keep processes until this one exits, which waits for their end; or end them, if it does not join the job."""
    if processes is None:
        yield
        return
    atexit.register(processes.wait)  # first: whoever joins registers its farewell later, which is said before
    try:
        yield
    except BaseException:
        processes.end()
        raise


def _host(config: Config) -> str:
    """What this host is called among the hosts of the ranks; empty if its workers are not to have an aggregator."""
    if not config.aggregate:
        return ""
    with contextlib.suppress(OSError):
        return f"{socket.gethostname()} {BOOT.read_text().strip()}"
    return socket.gethostname()


def _aggregated(hosts: Sequence[str]) -> list[list[int]]:
    """The ranks of the workers of each aggregator, if each rank is on that host."""
    placed: list[tuple[str, list[Member]]] = [
        (host or f"of rank {rank}", [("worker", rank)]) for rank, host in enumerate(hosts)
    ]
    return aggregated(placed)


def _settings(address: JobAddress, ranks: Ranks, one_host: bool, secret: str) -> Config:
    """The settings of a rank at an address that may have come from anyone.

    Raises:
        ConfigError: no rank 0 of this user would have said that address.
    """
    if one_host and not address.uri.startswith("ipc://"):  # torchrun's store takes what any host says
        raise ConfigError(
            f"the address of the job, {address.uri!r}, is not on this host, but all its ranks are. Rank 0 has not told "
            "it, so somebody else can write to where the ranks meet"
        )
    if address.uri.startswith("ipc://"):
        require_private(Path(address.uri.removeprefix("ipc://")).parent, follow_symlinks=False)
    return Config.from_env(inherited(address.contract(ranks.size, secret).variables("worker", ranks.rank)))
