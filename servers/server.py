"""The server as a process: the core and its loop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kvstore import wire
from kvstore.job.config import Config
from kvstore.transport import Transport
from servers.member import Surroundings
from servers.requests.replies import Outbox
from servers.shard_member import ShardMember


class Server(ShardMember):
    """A member that serves its shard until the workers are done or the job has failed. See ``ShardMember``."""

    def _serve(self) -> None:
        self._service.run(self._handling(self._shard.handle), self._tick, between=self._pace)

    def _notice(self, notice: wire.Message) -> Outbox:
        return self._shard.depart(notice.departed) if isinstance(notice, wire.Roster) else []

    def _tick(self) -> Outbox:
        self._failed()
        self._report()
        self._prepare()
        return []


def run_server(
    config: Config,
    make_transport: Callable[[], Transport],
    endpoint: str,
    clock: Callable[[], float] = time.monotonic,
    thread: Callable[..., threading.Thread] = threading.Thread,
) -> int:
    """Be a server, one of a pair if the job has replicas; see ``Server`` and ``ReplicaProcess``."""
    around = Surroundings(config, make_transport, endpoint, clock, thread)
    if config.replicas:
        from servers.replication.process import ReplicaProcess

        return ReplicaProcess(around).run()
    return Server(around).run()
