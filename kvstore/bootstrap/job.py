"""From ranks to a job: rank 0 starts it and tells the others its address; then all can join."""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Iterator
from pathlib import Path

from kvstore.bootstrap.job_address import JobAddress, require_safe
from kvstore.bootstrap.job_servers import JobServers
from kvstore.bootstrap.meeting import FileMeeting, meeting, on_one_host
from kvstore.errors import ConfigError
from kvstore.job.config import Config, inherited
from kvstore.job.directory import require_private
from kvstore.job.ranks import Ranks


@contextlib.contextmanager
def joining(config: Config) -> Iterator[Config]:
    """The settings with which a process joins its job, as a context that lasts while it joins.

    These are ``config`` if it has the job's address, or if no starter has given this process a rank. Otherwise rank 0's
    process starts the job's scheduler and servers. They end when all workers have left, which rank 0 waits for at its
    exit, when the job fails, or when rank 0's process dies.

    Raises:
        ConfigError: the ranks cannot meet, or not safely; the message says what to set.
        DeadlineExceeded: rank 0 has not told the address in time.
    """
    ranks = config.ranks
    if ranks is None:
        yield config
        return
    one_host = on_one_host(ranks)
    with meeting(ranks, config.join_limit_s) as met:
        secret = require_safe(config, one_host)
        if ranks.rank != 0:
            yield _settings(JobAddress.loads(met.hear()), ranks, one_host, secret)
            return
        servers = JobServers(config, ranks, one_host, secret, met.path if isinstance(met, FileMeeting) else None)
        atexit.register(servers.wait)  # first: whoever joins registers its farewell later, which is said before
        try:
            met.tell(servers.address.dumps())
            yield _settings(servers.address, ranks, one_host, secret)
        except BaseException:
            servers.end()
            raise
        finally:
            met.forget()


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
