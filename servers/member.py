"""A member that serves: it joins the job, serves until the workers are done or the job has failed, and leaves."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass

from kvstore import wire
from kvstore.errors import JOB_FAILED_EXIT, NodeLost
from kvstore.job.config import Config
from kvstore.job.exit_report import report_consequence
from kvstore.job.system import cpu_us, memory_bytes
from kvstore.member.session import Session
from kvstore.tracer import Tracer
from kvstore.transport import Transport
from kvstore.transport.memory import FreedMemory
from servers.activity import ServedActivity
from servers.requests.replies import Outbox
from servers.requests.request_tracer import RequestTracer
from servers.service import Service

MICRO = 1_000_000
MAX_WHY = 1024  # characters; see ``ServerReport``


@dataclass(frozen=True)
class Surroundings:
    """What the process of a member is given from outside."""

    config: Config
    make_transport: Callable[[], Transport]
    endpoint: str  # where to listen
    clock: Callable[[], float]  # seconds, monotonic
    thread: Callable[..., threading.Thread]


class ServingMember:
    """A member that serves. A subclass has a core, and serves it in ``_serve``; it calls ``_report`` at each tick.

    ``on_line_back`` is called in the loop when all links have to be reconnected.
    """

    def __init__(self, around: Surroundings, on_line_back: Callable[[], Outbox] | None = None) -> None:
        config = around.config
        self._clock = around.clock
        self._report_s, self._reports_at = config.heartbeat_s, 0.0
        self._transport = around.make_transport()
        self._freed = FreedMemory(self._transport.trim, around.clock)
        self._service = Service(self._transport, config.heartbeat_s / 2, around.clock)
        try:
            self._session = Session(
                config,
                around.make_transport,
                self._transport.bind(around.endpoint),
                around.clock,
                lambda notice: self._service.post(lambda: self._noticed(notice)),
                thread=around.thread,
                on_line_back=None if on_line_back is None else lambda: self._service.post(on_line_back),
            ).join()
            self._session.when_traced(self._note_requests)
        except BaseException:
            self._transport.close()
            raise

    def _note_requests(self, tracer: Tracer) -> None:
        self._service.tracer = RequestTracer(tracer)

    @property
    def name(self) -> str:
        return str(self._session.client.node)

    # How serving ends.
    #
    #   why                                 noticed in               leaves           exit code
    #   all workers are done: ``Stop``      _noticed                 in order         0
    #   the job has failed                  _failed, at a tick       in order         JOB_FAILED_EXIT
    #   an error, or SIGTERM                here                     with the error   1, or 143
    #   another process has this rank       ReplicaProcess           no: it is known  REPLACED_EXIT
    #   SIGKILL, a power failure            by missing heartbeats    no               -

    def run(self) -> int:
        """Serve; return 0, or ``JOB_FAILED_EXIT`` if the job failed."""
        error: str | None = None
        try:
            self._serve()
        finally:
            failure = self._session.client.failure  # a scheduler that is gone once this has left is no failure
            if sys.exc_info()[1] is not None:
                error = f"it ended with {sys.exc_info()[1]!r}"
            self._leave(error)
        if failure is not None:
            report_consequence(
                f"{self.name} ends", str(failure), failure.cause if isinstance(failure, NodeLost) else ""
            )
        return JOB_FAILED_EXIT if failure is not None else 0

    def _leave(self, error: str | None) -> None:
        self._session.leave(error)
        self._transport.close(linger=1.0)

    def _serve(self) -> None:
        raise NotImplementedError

    def _notice(self, notice: wire.Message) -> Outbox:
        raise NotImplementedError

    def _activity(self) -> ServedActivity:
        raise NotImplementedError

    def _report(self) -> None:
        """Send the scheduler this member's report, if it is time for that; give back memory that is not in use."""
        now = self._clock()
        if now < self._reports_at:
            return
        self._reports_at = now + self._report_s
        self._freed.look()
        rounds, held, lateness, waits, followed = self._activity()
        self._session.report(
            wire.ServerReport(
                self._session.client.node,
                at=now,
                rounds=rounds,
                busy_us=int(MICRO * self._service.busy_s),
                cpu_us=cpu_us(),
                memory=memory_bytes(),
                held=held,
                received=self._service.received,
                sent=self._service.sent,
                waves=lateness.waves,
                came_last=list(lateness.came_last),
                alone_us=[int(MICRO * seconds) for seconds in lateness.alone_s],
                waiting=sorted(waits.waiting),
                missing=sorted(waits.missing),
                oldest_us=int(MICRO * waits.oldest_s),
                why=waits.why[:MAX_WHY],
                **followed._asdict(),
            )
        )

    def _failed(self) -> bool:
        """Return whether the job has failed; stop the service then."""
        if self._session.client.failure is None:
            return False
        self._service.stop()
        return True

    def _noticed(self, notice: wire.Message) -> Outbox:
        if isinstance(notice, wire.Stop):
            self._service.stop()
            return []
        return self._notice(notice)
