"""The server and the scheduler as processes: each is a core and its loop."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from kvstore.errors import JOB_FAILED_EXIT
from kvstore.job.config import Config
from kvstore.transport import Transport
from kvstore.wire import Message, Roster
from servers.endpoints import scheduler_endpoint, warn_if_open
from servers.farewell import say
from servers.member import ServingMember
from servers.requests.replies import Outbox
from servers.scheduler import Scheduler
from servers.service import Service

log = logging.getLogger(__name__)

FAREWELL_S = 5.0


class Server(ServingMember):
    """A member that serves its shard until the workers are done or the job has failed. See ``ServingMember``."""

    def __init__(
        self,
        config: Config,
        make_transport: Callable[[], Transport],
        endpoint: str,
        clock: Callable[[], float],
        thread: Callable[..., threading.Thread],
    ) -> None:
        from servers.shard import Shard  # brings torch, which the scheduler does without

        super().__init__(config, make_transport, endpoint, clock, thread)
        self._shard = Shard(
            self._session.rank,
            self._session.num_workers,
            self._transport,
            self._transport,
            self._session.worker_keys,
            self._session.aggregated,
            self._session.aggregator_keys,
        )

    def _serve(self) -> None:
        self._service.run(self._shard.handle, self._tick)

    def _notice(self, notice: Message) -> Outbox:
        return self._shard.depart(notice.departed) if isinstance(notice, Roster) else []

    def _tick(self) -> Outbox:
        self._failed()
        return []


def run_server(
    config: Config,
    make_transport: Callable[[], Transport],
    endpoint: str,
    clock: Callable[[], float] = time.monotonic,
    thread: Callable[..., threading.Thread] = threading.Thread,
) -> int:
    """Be a server; see ``Server``."""
    return Server(config, make_transport, endpoint, clock, thread).run()


def run_scheduler(config: Config, transport: Transport, clock: Callable[[], float] = time.monotonic) -> int:
    """Be the scheduler until all members have left; return 0, or ``JOB_FAILED_EXIT`` if the job failed."""
    scheduler = Scheduler(
        config.num_workers,
        config.num_servers,
        config.heartbeat_timeout_s,
        FAREWELL_S,
        transport,
        "" if config.keys is None else config.keys.root,
        config.num_aggregators,
        config.replicas,
    )
    reported = False

    def stop_if_finished(outbox: Outbox) -> Outbox:
        nonlocal reported
        for line in scheduler.take_news():
            log.warning("%s", line)
        if scheduler.failure is not None and not reported:
            reported = True
            say("the job has failed", scheduler.failure)
        if scheduler.finished:
            service.stop()
        return outbox

    service = Service(transport, config.heartbeat_s / 2, clock)
    try:
        endpoint = scheduler_endpoint(config)
        transport.bind(endpoint)
        warn_if_open(config, endpoint)
        service.run(
            lambda peer, message: stop_if_finished(scheduler.handle(peer, message, clock())),
            lambda: stop_if_finished(scheduler.tick(clock())),
        )
    finally:
        transport.close(linger=1.0)
    return JOB_FAILED_EXIT if scheduler.failure is not None else 0
