"""A server and a scheduler as processes: the cores, their loops, and how they end."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable

from kvstore.config import Config
from kvstore.session import Session
from kvstore.transport import Transport
from kvstore.wire import JobFailed, Message, Roster, Stop
from servers.scheduler import Scheduler
from servers.service import Service

log = logging.getLogger(__name__)


def run_server(
    config: Config, make_transport: Callable[[], Transport], endpoint: str, clock: Callable[[], float] = time.monotonic
) -> int:
    """Be a server until the workers are done; return 0, or 1 if the job failed.

    Args:
        config: the job.
        make_transport: returns a new end for links.
        endpoint: where to listen for workers.
        clock: seconds, monotonic.
    """
    from servers.shard import Shard  # brings torch, which a scheduler does without

    transport = make_transport()
    failed = []
    early: list[Message] = []
    service: Service | None = None

    def take(notice: Message) -> None:
        if service is None:
            early.append(notice)
        elif isinstance(notice, Stop):
            service.stop()
        elif isinstance(notice, JobFailed):
            failed.append(notice.text)
            service.stop()
        elif isinstance(notice, Roster):
            service.post(lambda: shard.depart(notice.departed))

    try:
        session = Session(config, make_transport, transport.bind(endpoint), clock, take)
        shard = Shard(session.rank, session.num_workers)
        service = Service(transport, shard.handle, list, config.heartbeat_s, clock)
        for notice in early:
            take(notice)
        error: str | None = "it ended without being told to"
        try:
            service.run()
            error = None
        finally:
            if sys.exc_info()[1] is not None:
                error = f"it ended with {sys.exc_info()[1]!r}"
            session.leave(error)
    finally:
        transport.close(linger=1.0)
    if failed:
        log.error("server %d ends: %s", session.rank, failed[0])
    return 1 if failed else 0


def run_scheduler(config: Config, transport: Transport, clock: Callable[[], float] = time.monotonic) -> int:
    """Be the scheduler until all members have left; return 0, or 1 if the job failed."""
    try:
        transport.bind(config.root)
        scheduler = Scheduler(config.num_workers, config.num_servers, config.heartbeat_timeout_s)

        def tick() -> list[tuple[bytes, Message]]:
            outbox = scheduler.tick(clock())
            if scheduler.finished:
                service.stop()
            return outbox

        def handle(peer: bytes, message: Message) -> list[tuple[bytes, Message]]:
            outbox = scheduler.handle(peer, message, clock())
            if scheduler.finished:
                service.stop()
            return outbox

        service = Service(transport, handle, tick, config.heartbeat_s / 2, clock)
        service.run()
        return 1 if scheduler.failure is not None else 0
    finally:
        transport.close(linger=1.0)
