"""From ranks to a job: rank 0 starts scheduler and servers, and tells the others their address; then all can join.

If the ranks are on several hosts, rank 0 first hears on which. A host with two of them or more gets an aggregator,
which the first of them starts.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvstore.bootstrap.job_address import MOST_SERVERS, JobAddress, require_safe
from kvstore.bootstrap.meeting import FileMeeting, meeting, on_one_host
from kvstore.bootstrap.server_supervisor import MemberProcesses, SupervisedProcess
from kvstore.errors import ConfigError
from kvstore.job import threads
from kvstore.job.address import choose, is_loopback
from kvstore.job.config import Config, inherited
from kvstore.job.contract import Contract, Member, Role, aggregated, members
from kvstore.job.directory import make_private, require_private, temporary_root
from kvstore.job.place import FILE, MAX_COMMAND, ObservingPlace, address_and_key
from kvstore.job.processes import title, words
from kvstore.job.ranks import Ranks
from kvstore.job.settings import LOCAL_RANK, LOCAL_SIZE, NODE_HOST, REPLICAS
from kvstore.job.system import cores

BOOT = Path("/proc/sys/kernel/random/boot_id")  # tells machines of one name apart


def start_servers(
    config: Config,
    ranks: Ranks,
    one_host: bool,
    secret: str,
    remove: Path | None = None,
    aggregated: Sequence[Sequence[int]] = (),
) -> tuple[JobAddress, MemberProcesses]:
    """Start the scheduler and the servers of a job, and the aggregator of rank 0's host; return its address, and these.

    Args:
        config: rank 0's settings.
        one_host: whether all ranks are here.
        secret: what keys are made from; empty for plain links.
        remove: a file that the supervisor removes with the job, if this process cannot.
        aggregated: for each aggregator, the ranks of its host's workers.
    """
    servers = config.num_servers or min(ranks.size, MOST_SERVERS)
    groups = [list(group) for group in aggregated]
    listener = None if one_host else _listen(config, ranks)
    with listener or contextlib.nullcontext():
        directory = make_private(temporary_root())
        if listener is None:
            address = JobAddress(f"ipc://{directory}/scheduler", 0, servers, directory.name, groups)
        else:
            host, port = listener.getsockname()[:2]
            address = JobAddress(host, port, servers, f"kvstore-{os.getuid()}-{secrets.token_hex(8)}", groups)
        fd = -1 if listener is None else listener.fileno()
        contract = address.contract(ranks.size, secret, fd)
        _write_place(directory, contract, config.transport, ranks)
        own = address.aggregator_beside(ranks.rank)
        started = members(0, servers)
        if own >= 0:
            started.append(("aggregator", own))
        node_host = "" if listener is None or config.node_host else address.uri
        processes = [_process(contract, role, rank, node_host) for role, rank in started]
        reporter = processes[0].variables
        return address, MemberProcesses(config, ranks.rank, processes, reporter, str(directory), remove, fd)


def start_aggregator(config: Config, address: JobAddress, ranks: Ranks, secret: str) -> MemberProcesses | None:
    """Start the aggregator of this host, if this rank, which is not 0, is the one that does so."""
    own = address.aggregator_beside(ranks.rank)
    if own < 0:
        return None
    contract = address.contract(ranks.size, secret)
    process = _process(contract, "aggregator", own)
    reporter = contract.variables("scheduler", 0)
    return MemberProcesses(config, ranks.rank, [process], reporter, str(make_private(temporary_root())))


def _write_place(directory: Path, contract: Contract, transport: str, ranks: Ranks) -> None:
    """Write the file by which observers find the job; without it, they do not, and nothing else changes."""
    address, key = address_and_key(contract.uri, contract.port, contract.keyring)
    place = ObservingPlace(
        *(address, key, transport),
        job=contract.job,
        command=" ".join(sys.argv)[:MAX_COMMAND],
        launcher=ranks.family.starter,
        pid=os.getpid(),
        started=time.time(),
        workers=contract.num_workers,
        servers=contract.num_servers,
    )
    with contextlib.suppress(OSError):
        place.write(directory / FILE, durable=False)


def _process(contract: Contract, role: Role, rank: int, node_host: str = "") -> SupervisedProcess:
    variables = contract.variables(role, rank)
    place, siblings = (0, 1) if role == "aggregator" else (rank, contract.num_servers)
    variables |= threads.variables(os.environ, role, cores(), siblings)
    if role != "scheduler":
        variables |= {LOCAL_RANK.name: str(place), LOCAL_SIZE.name: str(siblings)}
    if node_host:
        variables[NODE_HOST.name] = node_host
    return SupervisedProcess(role, rank, [*words(sys.executable, "servers"), title(role, rank)], variables)


def _listen(config: Config, ranks: Ranks) -> socket.socket:
    """A socket at an address that the other hosts can reach, for the scheduler."""
    address = choose(host=config.node_host, interface=config.interface, toward=ranks.master)
    if is_loopback(address.ip) and not config.node_host:
        address = choose(interface=config.interface)  # the host's name leads to itself here, as on Debian
    listener = socket.socket(socket.AF_INET6 if ":" in address.ip else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.bind((address.ip, 0))
        listener.listen(128)
    except OSError as exc:
        listener.close()
        raise ConfigError(f"cannot listen at {address.ip} ({address.why}): {exc.strerror}") from None
    return listener


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
            "no process that has died again; start the job with launch.py --replicas 1, or unset the variable"
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
        address, processes = start_servers(config, ranks, one_host, secret, remove, aggregated)
        with _lasting(processes):
            try:
                met.tell(address.dumps())
                yield _settings(address, ranks, one_host, secret)
            finally:
                met.forget()


@contextlib.contextmanager
def _lasting(processes: MemberProcesses | None) -> Iterator[None]:
    """Keep processes until this one exits, which waits for their end; or end them, if it does not join the job."""
    if processes is None:
        yield
        return
    # First, because atexit calls the latest first: a store registers its farewell later, and says it before this waits.
    # The other way round, rank 0 would wait for servers that wait for its farewell.
    atexit.register(processes.wait)
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
    placed: list[tuple[str, list[Member]]] = [
        (host or f"of rank {rank}", [("worker", rank)]) for rank, host in enumerate(hosts)
    ]
    return aggregated(placed)


def _settings(address: JobAddress, ranks: Ranks, one_host: bool, secret: str) -> Config:
    """The settings of a rank at an address that may have come from anyone.

    Raises:
        ConfigError: no rank 0 of this user would have said that address.
    """
    # torchrun's store takes what any host says, and on one host links have no keys that would expose a stranger.
    if one_host and not address.uri.startswith("ipc://"):
        raise ConfigError(
            f"the address of the job, {address.uri!r}, is not on this host, but all its ranks are. Rank 0 did not "
            "publish this address, so another user can write to the rendezvous store"
        )
    if address.uri.startswith("ipc://"):
        require_private(Path(address.uri.removeprefix("ipc://")).parent, follow_symlinks=False)
    return Config.from_env(inherited(address.contract(ranks.size, secret).variables("worker", ranks.rank)))
