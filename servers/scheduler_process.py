"""The scheduler as a process: the core, its loop, and a log if another process may have to take its place."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from kvstore.errors import JOB_FAILED_EXIT
from kvstore.job.config import Config
from kvstore.transport import Transport
from servers.endpoints import scheduler_endpoint, warn_if_open
from servers.farewell import say
from servers.input_log import InputLog
from servers.requests.replies import Outbox
from servers.scheduler import Scheduler
from servers.scheduler.logged import FormerLinks, LoggedScheduler, Succession
from servers.scheduler_tracing import SchedulerTracing
from servers.service import Service

log = logging.getLogger(__name__)

FAREWELL_S = 5.0
LATE_S = 1.0  # how long a successor stays although all have left: who did not get the answer asks again


def run_scheduler(config: Config, transport: Transport, clock: Callable[[], float] = time.monotonic) -> int:
    """Be the scheduler until all members have left; return 0, or ``JOB_FAILED_EXIT`` if the job failed.

    Raises:
        KVStoreError: this process cannot take the place of the one before it; see ``InputLog``.
    """
    links = FormerLinks(transport)
    scheduler = Scheduler(
        config.num_workers,
        config.num_servers,
        config.heartbeat_timeout_s,
        FAREWELL_S,
        links if config.scheduler_log else transport,
        "" if config.keys is None else config.keys.root,
        config.num_aggregators,
        config.replicas,
        config.readers,
        "" if config.keys is None else config.keys.reader,
        "" if config.keys is None else config.keys.observer,
        config.start,
    )
    tracing = SchedulerTracing(scheduler, config, clock) if config.trace.last else None
    core: Scheduler | LoggedScheduler = scheduler
    inputs: InputLog | None = None
    stays_until = 0.0
    if config.scheduler_log:
        shape = config.num_workers, config.num_servers, config.num_aggregators, config.replicas
        inputs = InputLog(Path(config.scheduler_log), *shape)
        core = LoggedScheduler(scheduler, links, inputs.write)
        if inputs.earlier:
            core.replay(inputs.earlier, clock())
            inputs.earlier.clear()
            inputs.write(Succession())
            stays_until = clock() + LATE_S
    reported = False

    def awaited() -> bool:
        """Whether somebody who looks on is still to see how the job has ended."""
        return scheduler.to_be_seen or (tracing is not None and tracing.awaited())

    def tick() -> Outbox:
        nonlocal tracing
        if tracing is None and scheduler.observing.traces is not None:  # an observer has asked for a trace
            tracing = SchedulerTracing(scheduler, config, clock)
            service.tracer = tracing.requests
        if tracing is not None:
            tracing.tick()
        return stop_if_finished(core.tick(clock()))

    def stop_if_finished(outbox: Outbox) -> Outbox:
        nonlocal reported
        for line in scheduler.take_news():
            log.warning("%s", line)
        if scheduler.failure is not None and not reported:
            reported = True
            say("the job has failed", scheduler.failure, scheduler.cause)
        if scheduler.finished and clock() >= stays_until and not awaited():
            service.stop()
        return outbox

    service = Service(transport, config.heartbeat_s / 2, clock)
    if tracing is not None:
        service.tracer = tracing.requests
    try:
        endpoint = scheduler_endpoint(config)
        transport.bind(endpoint)
        warn_if_open(config, endpoint)
        if config.lost:
            how, when = config.lost
            log.warning("the scheduler was lost (%s); its successor took over in %.1f s", how, clock() - when)
        service.run(
            lambda peer, message: stop_if_finished(core.handle(peer, message, clock())),
            tick,
            scheduler.due,
        )
    finally:
        transport.close(linger=1.0)
        if inputs is not None:
            inputs.close()
    return JOB_FAILED_EXIT if scheduler.failure is not None else 0
