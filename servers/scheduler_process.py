"""The scheduler as a process: the core, its loop, and a log if another process may have to take its place."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Set
from pathlib import Path

from kvstore import wire
from kvstore.errors import JOB_FAILED_EXIT, KVStoreError
from kvstore.job.config import Config
from kvstore.job.exit_report import report_consequence, report_given_up
from kvstore.tracer import Tracer
from kvstore.transport import Transport
from servers.endpoints import scheduler_endpoint, warn_if_open
from servers.requests.replies import Outbox
from servers.requests.request_tracer import RequestTracer
from servers.scheduler import Scheduler
from servers.scheduler.logged import (
    FormerLinks,
    LiveRecords,
    LoggedScheduler,
    Record,
    RecordPacker,
    Succession,
    beginning,
    unpack,
)
from servers.scheduler.traces import Traces
from servers.service import Service

log = logging.getLogger(__name__)

FAREWELL_S = 5.0
LATE_S = 1.0  # how long a successor stays although all have left: a member that did not get the answer asks again
TRIM_BYTES = 1 << 18  # a log that has grown by so much, and to twice its length, is trimmed


class InputLog:
    """The file with a scheduler's log, which takes up where the one before it was killed.

    It is in the job's private directory. It holds public keys and members' messages, but no secrets. Nothing is synced
    to the disk: the scheduler is killed, not the machine.

    Args:
        path: the file. Where there is none, this is the job's first scheduler.
        shape: see ``beginning``; its first number is that of the workers.
        lost: the workers that are lost, at any time.

    Attributes:
        earlier: what is in the log already; empty if this is the first scheduler.
    """

    def __init__(self, path: Path, *shape: int, lost: Set[int] = frozenset()) -> None:
        self._path = path
        self._begins = beginning(*shape)
        self._packer = RecordPacker()
        self._live = LiveRecords(shape[0], lost)
        self._file = -1
        self._length = self._trim_at = 0
        try:
            self.earlier = list(self._read())
            self._begin()
        except OSError as exc:
            raise KVStoreError(f"the scheduler's log, {path}: {exc.strerror}") from None

    def write(self, record: Record) -> None:
        """Write a record. If that is not possible, give the log up: it must not be replayed without it."""
        if self._file < 0:
            return
        data = self._packer.pack(record)
        self._live.add(data, record)
        try:
            self._append(data)
            if self._length > self._trim_at:
                self._begin()
        except OSError as exc:
            self._give_up(exc)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _read(self) -> Iterator[Record]:
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return
        if not data:
            raise KVStoreError(
                "the scheduler was started again, but the one before could not write its log to the end (it has said "
                "why), so nobody knows where the job was"
            )
        for record, packed in unpack(data, self._begins, self._packer):
            self._live.add(packed, record)
            if record is not None:
                yield record

    def _begin(self) -> None:
        """Write the log anew, without the records that are not needed any more, and go on behind them."""
        content = self._begins + self._live.trim()
        draft = self._path.with_name(f"{self._path.name}.part")
        new = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        before, self._file, self._length = self._file, new, 0
        if before >= 0:
            os.close(before)
        self._append(content)
        draft.replace(self._path)
        self._trim_at = self._length + max(self._length, TRIM_BYTES)

    def _append(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            left = left[os.write(self._file, left) :]
        self._length += len(data)

    def _give_up(self, exc: OSError) -> None:
        log.error(
            "the scheduler's log, %s, cannot be written: %s. The job goes on, but will end if the scheduler dies",
            self._path,
            exc.strerror,
        )
        self.close()
        os.truncate(self._path, 0)


class SchedulerTracing:
    """The scheduler's own notes for the job's trace, beside those that it passes on for members.

    It lets ``scheduler`` keep members' notes. ``requests`` notes what the scheduler handles.
    """

    def __init__(self, scheduler: Scheduler, config: Config, clock: Callable[[], float]) -> None:
        self._tracer = Tracer(config.trace, clock)
        self._node = wire.Node("scheduler", 0, config.start)
        self._traces = scheduler.observing.traces = scheduler.observing.traces or Traces(clock(), config.start)
        self._events, self._seen = scheduler.observing.events, 0
        now = clock()
        self._tracer.offsets.take(config.start, now, now, now)  # its own clock is the scheduler's
        self.requests = RequestTracer(self._tracer)

    def tick(self) -> None:
        """Put this process's notes to the rest. Call it now and then."""
        if self._traces.open is not None:  # the scheduler has no rounds: it follows the workers
            self._tracer.open = self._traces.open
        first, events = self._events.after(self._seen)
        self._seen = first + len(events) - 1
        if self._tracer.open:
            for at, text in events:
                self._tracer.mark(text, at)
        for chunk in self._tracer.chunks(self._node):
            self._traces.take(chunk)

    def awaited(self) -> bool:
        """Return whether an observer is still to fetch something. Call it when the job is over."""
        self.tick()
        return self._traces.awaited(self._tracer.clock())


def run_scheduler(config: Config, transport: Transport, clock: Callable[[], float] = time.monotonic) -> int:
    """Be the scheduler until all members have left; return 0, or ``JOB_FAILED_EXIT`` if the job failed."""
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
        config.min_workers,
        # A job that starts workers again has a log for its scheduler, which is started again, too.
        (config.patience_s or math.inf) if config.scheduler_log or config.max_workers else 0.0,
        config.max_workers,
    )
    tracing = SchedulerTracing(scheduler, config, clock) if config.trace.last else None
    core: Scheduler | LoggedScheduler = scheduler
    inputs: InputLog | None = None
    stays_until = 0.0
    if config.scheduler_log:
        shape = config.num_workers, config.num_servers, config.num_aggregators, config.replicas
        inputs = InputLog(Path(config.scheduler_log), *shape, lost=scheduler.lost_workers)
        core = LoggedScheduler(scheduler, links, inputs.write)
        if inputs.earlier:
            core.replay(inputs.earlier, clock())
            inputs.earlier.clear()
            inputs.write(Succession())
            stays_until = clock() + LATE_S
    reported = False

    def awaited() -> bool:
        """Whether an observer is still to see how the job has ended."""
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
            report_consequence("the job has failed", scheduler.failure, scheduler.cause)
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
    if scheduler.failure is not None:
        return JOB_FAILED_EXIT
    if scheduler.given_up:
        report_given_up(scheduler.given_up)
    return 0
