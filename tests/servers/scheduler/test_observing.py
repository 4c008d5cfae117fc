"""What the scheduler knows of how the job is: whose notices it takes, and what there is to fetch."""

from __future__ import annotations

from made_reports import worker_report
from rendezvous import Job

from kvstore import wire
from kvstore.wire.guests import MOST_EVENTS
from servers.scheduler.observing import Events
from servers.scheduler.traces import ATTENTIVE_S, Traces

OBSERVER = wire.Sender(wire.Node("observer", -1, 77), 1, 1)


def chunk(role: str, rank: int) -> wire.TraceChunk:
    return wire.TraceChunk(wire.Node(role, rank, 1), [], [], True, 1, 0, [b"\x92\x90\x90"])


def test_notices_of_members_are_its_own_and_requests_are_not():
    job = Job()
    observing = job.scheduler.observing
    assert observing.take(job.workers[0].beats, worker_report(rank=0), job.now)
    assert observing.take(job.workers[0].beats, chunk("worker", 0), job.now)
    assert not observing.take(b"w0", wire.Barrier(job.workers[0].me, 0, 1), job.now)


def test_a_trace_is_kept_where_somebody_wants_one_and_of_members_alone():
    job = Job()
    observing = job.scheduler.observing
    ((_, refused),) = job.handle(b"an observer", wire.FetchTrace(OBSERVER, 0))
    assert isinstance(refused, wire.Failure)
    assert "kvstore-status --trace" in refused.text
    observing.traces = Traces(job.now, 1)
    job.handle(job.workers[0].beats, chunk("worker", 0))
    job.handle(b"a stranger", chunk("worker", 9))
    assert [kept.node.rank for kept in observing.traces.fetch(wire.FetchTrace(OBSERVER, 0), job.now).chunks] == [0]


def test_what_a_member_has_noted_last_may_come_when_it_has_left():
    job = Job()
    observing = job.scheduler.observing
    observing.traces = Traces(job.now, 1)
    worker = job.workers[0]
    job.say(worker, worker.leave())
    job.handle(worker.beats, chunk("worker", 0))
    assert [kept.node.rank for kept in observing.traces.fetch(wire.FetchTrace(OBSERVER, 0), job.now).chunks] == [0]


def test_an_observer_begins_a_trace_and_members_hear_of_it_at_once_and_at_each_beat():
    job = Job()
    sent = job.handle(b"an observer", wire.FetchTrace(OBSERVER, 0, [7, 9]))
    told = wire.Alive(traced=[7, 9])
    assert [whom for whom, message in sent if message == told] == job.everyone
    assert isinstance(sent[0][1] if sent[0][0] == b"an observer" else sent[-1][1], wire.TraceFetched)
    assert [message for _, message in job.handle(b"an observer", wire.FetchTrace(OBSERVER, 0, [7, 9]))] == [
        wire.TraceFetched(1, 1, 0, False, [])
    ]
    assert job.beat(job.workers[0]) == [told]


def test_another_trace_has_nothing_of_the_one_before():
    job = Job()
    for first, last, kept in ((1, 9, 0), (1, 1, 1), (5, 6, 0)):  # the second ends the first earlier
        sent = job.handle(b"an observer", wire.FetchTrace(OBSERVER, 0, [first, last]))
        (fetched,) = [message for _, message in sent if isinstance(message, wire.TraceFetched)]
        assert len(fetched.chunks) == kept
        job.handle(job.workers[0].beats, chunk("worker", 0))


def test_one_observer_at_a_time_writes_the_trace():
    job = Job()
    job.handle(b"an observer", wire.FetchTrace(OBSERVER, 0, [7, 9]))
    other = wire.Sender(wire.Node("observer", -1, 78), 1, 1)
    ((_, refused),) = job.handle(b"another", wire.FetchTrace(other, 0, [1, 2]))
    assert isinstance(refused, wire.Failure)
    assert "being written already" in refused.text
    job.tick(ATTENTIVE_S)
    assert any(
        isinstance(message, wire.TraceFetched)
        for _, message in job.handle(b"another", wire.FetchTrace(other, 0, [1, 2]))
    )
    job.handle(b"an observer", wire.Leave(OBSERVER, None))
    ((_, refused),) = job.handle(b"an observer", wire.FetchTrace(OBSERVER, 0, [7, 9]))
    assert isinstance(refused, wire.Failure), "the other goes on"
    job.handle(b"another", wire.Leave(other, None))
    sent = job.handle(b"an observer", wire.FetchTrace(OBSERVER, 0, [7, 9]))
    assert any(isinstance(message, wire.TraceFetched) for _, message in sent)


def test_observers_hear_of_a_death_before_members_and_of_each_once():
    job = Job()
    job.handle(b"an observer", wire.Observe(OBSERVER, 0))
    assert not [whom for whom, _ in job.say(job.workers[1], job.workers[1].leave()) if whom == b"an observer"]
    sent = job.handle(b"launcher", wire.Lost("worker", 0, "was killed"))
    assert sent[0] == (b"an observer", wire.Ack(0))
    assert wire.JobFailed("worker 0 was killed") in [message for _, message in sent[1:]]
    assert job.handle(b"launcher", wire.Lost("server", 0, "exited with code 3"))[:1] == [(b"an observer", wire.Ack(0))]
    assert job.handle(b"launcher", wire.Lost("server", 0, "exited with code 3")) == []


def events_of(count: int) -> Events:
    events = Events()
    for number in range(1, count + 1):
        events.add(float(number), f"event {number}")
    return events


def test_nothing_has_happened_at_first() -> None:
    assert Events().after(0) == (1, [])


def test_who_has_seen_some_is_told_the_rest() -> None:
    events = events_of(3)
    assert events.after(0) == (1, [[1.0, "event 1"], [2.0, "event 2"], [3.0, "event 3"]])
    assert events.after(2) == (3, [[3.0, "event 3"]])
    assert events.after(3) == (4, [])


def test_only_the_latest_are_kept() -> None:
    first, lines = events_of(MOST_EVENTS + 10).after(3)
    assert (first, len(lines), lines[0]) == (11, MOST_EVENTS, [11.0, "event 11"])


def test_a_long_line_is_cut_so_that_no_answer_is_refused_for_its_length() -> None:
    events = Events()
    events.add(1.0, "x" * (wire.MAX_REASON + 1))
    assert events.after(0)[1] == [[1.0, "x" * wire.MAX_REASON]]


def test_who_has_seen_those_of_another_scheduler_is_told_all() -> None:
    assert events_of(2).after(7) == (1, [[1.0, "event 1"], [2.0, "event 2"]])
