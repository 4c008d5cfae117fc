"""The scheduler and the servers that rank 0 starts, through their supervisor, and whose end it waits for."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
from pathlib import Path

from kvstore.bootstrap.job_address import MOST_SERVERS, JobAddress
from kvstore.bootstrap.server_supervisor import SupervisedJob, SupervisedProcess
from kvstore.errors import ConfigError
from kvstore.job import threads
from kvstore.job.address import choose, is_loopback
from kvstore.job.config import Config, inherited
from kvstore.job.contract import members
from kvstore.job.directory import make_private, temporary_root
from kvstore.job.processes import complete, source_root, words
from kvstore.job.ranks import Ranks
from kvstore.job.settings import LOCAL_RANK, LOCAL_SIZE, NODE_HOST
from kvstore.job.system import cores

END_S = 10.0


class JobServers:
    """The scheduler and the servers of a job. They run from construction on.

    Args:
        config: rank 0's settings.
        ranks: who the workers are.
        one_host: whether all of these are here.
        secret: what keys are made from; empty for plain links.
        remove: a file that the supervisor removes with the job, if this process cannot.

    Raises:
        ConfigError: this host has no usable address, or no room for the job's directory.
    """

    def __init__(self, config: Config, ranks: Ranks, one_host: bool, secret: str, remove: Path | None = None) -> None:
        self._pid = os.getpid()
        servers = config.num_servers or min(ranks.size, MOST_SERVERS)
        listener = None if one_host else _listen(config, ranks)
        with listener or contextlib.nullcontext():
            self._directory = str(make_private(temporary_root()))
            if listener is None:
                self.address = JobAddress(f"ipc://{self._directory}/scheduler", 0, servers, Path(self._directory).name)
            else:
                host, port = listener.getsockname()[:2]
                self.address = JobAddress(host, port, servers, f"kvstore-{os.getuid()}-{secrets.token_hex(8)}")
            fd = -1 if listener is None else listener.fileno()
            task = SupervisedJob(
                self._pid,
                self._members(config, ranks, secret, fd),
                self._directory,
                [self._directory, *([] if remove is None else [str(remove)])],
                fd,
                config.heartbeat_timeout_s + 5.0,  # until whoever cannot be told has heard the silence
            )
            try:
                self._supervisor = subprocess.Popen(
                    words(sys.executable, "kvstore.bootstrap"),
                    stdin=subprocess.PIPE,
                    stdout=2,
                    env=complete(inherited({}), source_root()),
                    pass_fds=() if fd < 0 else (fd,),
                    start_new_session=True,  # Ctrl-C is for the script, at whose end this ends
                )
            except BaseException:
                self._remove()
                raise
        if self._supervisor.stdin is not None:
            with contextlib.suppress(BrokenPipeError), self._supervisor.stdin as pipe:  # it has said why it ended
                pipe.write(task.dumps().encode())

    def _members(self, config: Config, ranks: Ranks, secret: str, fd: int) -> list[SupervisedProcess]:
        contract = self.address.contract(ranks.size, secret, fd)
        processes = []
        for role, rank in members(0, self.address.servers):
            variables = contract.variables(role, rank)
            variables |= threads.variables(os.environ, role, cores(), self.address.servers)
            if role == "server":
                variables |= {LOCAL_RANK.name: str(rank), LOCAL_SIZE.name: str(self.address.servers)}
            if not self.address.uri.startswith("ipc://") and not config.node_host:
                variables[NODE_HOST.name] = self.address.uri
            processes.append(SupervisedProcess(role, rank, list(words(sys.executable, "servers")), variables))
        return processes

    def wait(self) -> None:
        """Wait until all have ended: when all workers have left, or the job has failed."""
        if os.getpid() != self._pid:
            return  # a fork of that process, which has no children here
        try:
            self._supervisor.wait()
        finally:
            self.end()

    def end(self) -> None:
        """End the processes that still run. May be called again."""
        self._supervisor.terminate()
        try:
            self._supervisor.wait(END_S)
        except subprocess.TimeoutExpired:
            self._supervisor.kill()
            self._supervisor.wait()
        self._remove()

    def _remove(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)


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
