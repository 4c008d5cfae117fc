"""What the scheduler knows of how the job is: whose notices it takes, and what there is to fetch."""

from __future__ import annotations

from made_reports import worker_report
from rendezvous import Job

from kvstore.wire import Barrier, Failure, FetchTrace, Node, Sender, TraceChunk
from servers.scheduler.traces import Traces

OBSERVER = Sender(Node("observer", -1, 77), 1, 1)


def chunk(role: str, rank: int) -> TraceChunk:
    return TraceChunk(Node(role, rank, 1), [], [], True, [b"\x90"])


def test_notices_of_members_are_its_own_and_requests_are_not():
    job = Job()
    observing = job.scheduler.observing
    assert observing.take(job.workers[0].beats, worker_report(rank=0), job.now)
    assert observing.take(job.workers[0].beats, chunk("worker", 0), job.now)
    assert not observing.take(b"w0", Barrier(job.workers[0].me, 0, 1), job.now)


def test_a_trace_is_kept_where_somebody_wants_one_and_of_members_alone():
    job = Job()
    observing = job.scheduler.observing
    ((_, refused),) = job.handle(b"an observer", FetchTrace(OBSERVER, 0))
    assert isinstance(refused, Failure)
    assert "launch.py --trace" in refused.text
    observing.traces = Traces(job.now, 1)
    job.handle(job.workers[0].beats, chunk("worker", 0))
    job.handle(b"a stranger", chunk("worker", 9))
    assert [kept.node.rank for kept in observing.traces.fetch(FetchTrace(OBSERVER, 0), job.now).chunks] == [0]


def test_what_a_member_has_noted_last_may_come_when_it_has_left():
    job = Job()
    observing = job.scheduler.observing
    observing.traces = Traces(job.now, 1)
    worker = job.workers[0]
    job.say(worker, worker.leave())
    job.handle(worker.beats, chunk("worker", 0))
    assert [kept.node.rank for kept in observing.traces.fetch(FetchTrace(OBSERVER, 0), job.now).chunks] == [0]
