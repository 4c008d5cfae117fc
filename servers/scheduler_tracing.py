"""What the scheduler itself notes for the job's trace, beside what it passes on for members."""

from __future__ import annotations

from collections.abc import Callable

from kvstore import wire
from kvstore.job.config import Config
from kvstore.tracing.tracer import Tracer
from servers.requests.request_tracer import RequestTracer
from servers.scheduler import Scheduler
from servers.scheduler.traces import Traces


class SchedulerTracing:
    """See the module. It lets ``scheduler`` keep what members have noted.

    Args:
        scheduler: the core.
        config: the job.
        clock: seconds, monotonic.

    Attributes:
        requests: notes what the scheduler handles.
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
        """Put what this process has noted to the rest. Call it now and then."""
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
