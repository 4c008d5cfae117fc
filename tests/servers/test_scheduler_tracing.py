"""What the scheduler notes itself goes the way of what members note, and its own clock is right."""

from __future__ import annotations

from kvstore import wire
from kvstore.job.config import Config
from kvstore.job.valid_values import RoundWindow
from kvstore.wire.tracing import read_records
from servers.scheduler import Scheduler
from servers.scheduler_tracing import SchedulerTracing

FETCH = wire.FetchTrace(wire.Sender(wire.Node("observer", 0, 5), 1, 1), 0)


def made(now: float = 50.0) -> tuple[Scheduler, SchedulerTracing]:
    scheduler = Scheduler(1, 1, 10.0)
    return scheduler, SchedulerTracing(scheduler, Config(trace=RoundWindow(1, 2), start=3), lambda: now)


def test_events_become_a_chunk_at_the_next_tick() -> None:
    scheduler, tracing = made()
    scheduler.observing.events.add(49.0, "worker 1 was lost")
    tracing.tick()
    assert scheduler.observing.traces is not None
    assert tracing.awaited()
    (chunk,) = scheduler.observing.traces.fetch(FETCH, 50.0).chunks
    assert chunk.node == ("scheduler", 0, 3)
    assert chunk.offsets == [[3, 0.0, 0.0]]
    assert [record[2:] for record in read_records(chunk)] == [[49.0, "worker 1 was lost"]]
    tracing.tick()
    assert len(scheduler.observing.traces.fetch(FETCH, 50.0).chunks) == 1


def test_it_stops_with_the_workers() -> None:
    scheduler, tracing = made()
    assert scheduler.observing.traces is not None
    scheduler.observing.traces.take(wire.TraceChunk(wire.Node("worker", 0, 1), [], [], True, 1, 0, [b"\x92\x90\x90"]))
    tracing.tick()
    tracing.requests.note(50.0, 50.0, [], b"a", FETCH)
    tracing.tick()
    assert [chunk.node.role for chunk in scheduler.observing.traces.fetch(FETCH, 50.0).chunks] == ["worker"]
