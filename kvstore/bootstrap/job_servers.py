"""The scheduler and the servers, which rank 0 starts, and aggregators, each of which a rank of its host starts."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from kvstore.bootstrap.job_address import MOST_SERVERS, JobAddress
from kvstore.bootstrap.member_processes import MemberProcesses
from kvstore.bootstrap.server_supervisor import SupervisedProcess
from kvstore.errors import ConfigError
from kvstore.job import threads
from kvstore.job.address import choose, is_loopback
from kvstore.job.config import Config
from kvstore.job.contract import Contract, Role, members
from kvstore.job.directory import make_private, temporary_root
from kvstore.job.observing_place import FILE, MAX_COMMAND, ObservingPlace, address_and_key
from kvstore.job.processes import words
from kvstore.job.ranks import Ranks
from kvstore.job.settings import LOCAL_RANK, LOCAL_SIZE, NODE_HOST
from kvstore.job.system import cores
from kvstore.job.title import title


class JobServers:
    """The scheduler and the servers of a job, and the aggregator of rank 0's host. They run from construction on.

    Args:
        config: rank 0's settings.
        ranks: who the workers are.
        one_host: whether all of these are here.
        secret: what keys are made from; empty for plain links.
        remove: a file that the supervisor removes with the job, if this process cannot.
        aggregated: for each aggregator, the ranks of its host's workers.

    Attributes:
        address: of the job.

    Raises:
        ConfigError: this host has no usable address, or no room for the job's directory.
    """

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        one_host: bool,
        secret: str,
        remove: Path | None = None,
        aggregated: Sequence[Sequence[int]] = (),
    ) -> None:
        servers = config.num_servers or min(ranks.size, MOST_SERVERS)
        groups = [list(group) for group in aggregated]
        listener = None if one_host else _listen(config, ranks)
        with listener or contextlib.nullcontext():
            directory = str(make_private(temporary_root()))
            if listener is None:
                self.address = JobAddress(f"ipc://{directory}/scheduler", 0, servers, Path(directory).name, groups)
            else:
                host, port = listener.getsockname()[:2]
                job = f"kvstore-{os.getuid()}-{secrets.token_hex(8)}"
                self.address = JobAddress(host, port, servers, job, groups)
            fd = -1 if listener is None else listener.fileno()
            contract = self.address.contract(ranks.size, secret, fd)
            _write_place(Path(directory), contract, config.transport, ranks)
            own = self.address.aggregator_beside(ranks.rank)
            started = members(0, servers)
            if own >= 0:
                started.append(("aggregator", own))
            node_host = "" if listener is None or config.node_host else self.address.uri
            processes = [_process(contract, role, rank, node_host) for role, rank in started]
            reporter = processes[0].variables
            self._processes = MemberProcesses(config, ranks.rank, processes, reporter, directory, remove, fd)

    def wait(self) -> None:
        """Wait until all have ended: when all workers have left, or the job has failed."""
        self._processes.wait()

    def end(self) -> None:
        """End the processes that still run. May be called again."""
        self._processes.end()


def start_aggregator(config: Config, address: JobAddress, ranks: Ranks, secret: str) -> MemberProcesses | None:
    """Start the aggregator of this host, if this rank, which is not 0, is to do so.

    Args:
        config: this rank's settings.
        address: of the job.
        ranks: who the workers are.
        secret: what keys are made from; empty for plain links.

    Raises:
        ConfigError: there is no room for its directory.
    """
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
