"""What the scheduler tells of a job to observers and readers."""

from __future__ import annotations

from typing import Any

import pytest
from asking import Door, sender
from made_reports import worker_report
from rendezvous import LIMIT, Job

from kvstore import wire
from kvstore.errors import KVStoreError, NodeLost
from kvstore.observing.view import JobView
from kvstore.wire.guests import MOST_EVENTS
from kvstore.wire.tracing import MOST_CHUNKS
from servers.scheduler.core import Scheduler
from servers.scheduler.departures import Departures
from servers.scheduler.guests import PAGE, READERS_SILENT_S, Readers
from servers.scheduler.observing import LOOK_S, MOST_OBSERVERS, SILENT_S, Events
from servers.scheduler.stores import Stores
from servers.scheduler.traces import ATTENTIVE_S, FIRST_S, Traces

# ---- what the scheduler knows of how the job is: whose notices it takes, and what there is to fetch


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


def observe(after: int = 0, nonce: int = 7, seq: int = 1) -> wire.Observe:
    return wire.Observe(sender(-1, seq, role="observer", incarnation=nonce), after)


def ask(job: Job, message: wire.Message, peer: bytes = b"observer") -> Any:
    [(to, reply)] = job.scheduler.handle(peer, message, job.now)
    assert to == peer
    return reply


def view(job: Job, after: int = 0) -> JobView:
    observed = ask(job, observe(after))
    assert isinstance(observed, wire.Observed), observed
    return JobView.of(observed)


def test_a_job_that_has_begun_is_shown_with_its_members() -> None:
    seen = view(Job(2, 1))
    assert (seen.num_workers, seen.num_servers, seen.num_standbys, seen.num_aggregators) == (2, 1, 0, 0)
    assert [(member.name, member.state) for member in seen.of_role("worker")] == [
        ("worker 0", "ready"),
        ("worker 1", "ready"),
    ]
    assert [event.text for event in seen.events] == ["all 3 members have joined"]
    assert (seen.failure, seen.waits) == (None, "")


def test_who_has_not_joined_is_named() -> None:
    job, w0, _, s0 = Job(2, 1, start=False).and_members()
    job.say(w0, w0.join())
    job.say(s0, s0.join())
    seen = view(job)
    assert seen.waits == "waits for worker 1 to join"
    assert [(member.name, member.state) for member in seen.members] == [("worker 0", "joined"), ("server 0", "joined")]


def test_observers_are_told_where_each_process_runs_and_members_are_not() -> None:
    job = Job(2, 1, replicas=1)
    lost = job.standbys[0]
    job.scheduler.handle(b"launcher", wire.Lost("standby", 0, "was killed by SIGKILL", 1, False), job.now)
    later = lost.again()
    welcomed = job.say(later, later.join())
    assert {member.name: (member.host, member.pid) for member in view(job).members} == {
        "worker 0": ("node100", 100),
        "worker 1": ("node101", 101),
        "server 0": ("node20", 20),
        "standby 0": (f"node{later.nonce}", later.nonce),
    }
    assert welcomed
    assert "node" not in repr([message for _, message in welcomed]).replace("node=", "")


def test_silence_loss_and_failure_are_shown() -> None:
    job = Job(2, 1)
    job.now += 3.0
    assert [member.silent_s for member in view(job).members] == [3.0, 3.0, 3.0]
    job.scheduler.handle(b"launcher", wire.Lost("worker", 1, "was killed by SIGKILL", 0, False), job.now)
    seen = view(job, after=1)
    assert seen.failure == "worker 1 was killed by SIGKILL"
    assert [event.text for event in seen.events] == [
        "worker 1 is lost",
        "the job has failed: worker 1 was killed by SIGKILL",
    ]
    assert {member.name: member.state for member in seen.members}["worker 1"] == "lost"


def test_those_who_wait_at_a_barrier_are_named_and_those_who_do_not_come() -> None:
    job = Job(3, 1)
    for rank in (0, 2):
        member = job.everyone[rank]
        job.say(member, wire.OpenStore(sender(rank, 2), 1))
        job.say(member, wire.Barrier(sender(rank, 3), 0, 1))
    job.now += 7.0
    seen = view(job)
    assert seen.waits == "workers 0, 2 wait at the barrier for worker 1 (has not come yet), for 7.0 s"
    assert seen.awaited == [1]


def test_those_who_wait_for_first_values_are_named() -> None:
    job = Job(2, 1)
    job.say(job.everyone[1], job.everyone[1].declare("a"))
    seen = view(job)
    assert (seen.waits, seen.awaited) == ("worker 1 waits for worker 0 to init keys", [0])


def test_observers_are_counted_and_the_silent_ones_are_not() -> None:
    job = Job(1, 1)
    for nonce in range(MOST_OBSERVERS):
        assert isinstance(ask(job, observe(nonce=nonce), b"%d" % nonce), wire.Observed)
    refused = ask(job, observe(nonce=100), b"one more")
    assert isinstance(refused, wire.Failure)
    assert f"{MOST_OBSERVERS} observers already" in refused.text
    assert ask(job, wire.Leave(sender(-1, role="observer", incarnation=3), None), b"3") == wire.Ack(1)
    assert isinstance(ask(job, observe(nonce=100), b"one more"), wire.Observed)
    job.now += SILENT_S + 1
    assert isinstance(ask(job, observe(nonce=101), b"and another"), wire.Observed)


def test_an_observer_asks_nothing_that_changes_the_job() -> None:
    job = Job(1, 1)
    me = sender(-1, role="observer")
    requests: list[wire.Message] = [
        wire.Barrier(sender(0, role="observer"), 0, 1),
        wire.OpenStore(me, 1),
        wire.Join(me, ""),
    ]
    for request in requests:
        refused = ask(job, request)
        assert isinstance(refused, wire.Failure)
        assert "observers change nothing" in refused.text
    assert ask(job, wire.Explain(me, 1)) == wire.Explanation(1, "")


KEYS = {b"observer": "observers' key", b"worker": "worker 0's key"}


@pytest.mark.parametrize(
    ("peer", "message", "why"),
    [
        (b"worker", observe(), "another key than observers have"),
        (b"observer", wire.Barrier(sender(0), 0, 1), "good for looking on alone"),
        (b"observer", wire.Locate(sender(0), "worker", [0]), "good for looking on alone"),
    ],
    ids=["another key", "another role", "a member's question"],
)
def test_the_key_decides(peer: bytes, message: wire.Message, why: str) -> None:
    scheduler = Scheduler(1, 1, LIMIT, admission=Door(KEYS), observer_key="observers' key")
    [(_, refused)] = scheduler.handle(peer, message, 0.0)
    assert isinstance(refused, wire.Failure)
    assert why in refused.text


def test_with_the_right_key_an_observer_is_answered() -> None:
    scheduler = Scheduler(1, 1, LIMIT, admission=Door(KEYS), observer_key="observers' key")
    [(_, observed)] = scheduler.handle(b"observer", observe(), 5.0)
    assert isinstance(observed, wire.Observed)
    assert (observed.at, observed.started) == (5.0, 5.0)


def test_who_looks_regularly_sees_a_failure_before_the_scheduler_ends() -> None:
    job = Job(2, 1)
    assert not job.scheduler.to_be_seen
    view(job)
    job.now += 0.5
    job.scheduler.handle(b"launcher", wire.Lost("worker", 1, "was killed by SIGKILL", 0, False), job.now)
    assert job.scheduler.to_be_seen
    job.now += 0.5
    assert view(job).failure
    assert not job.scheduler.to_be_seen


def test_who_does_not_look_any_more_is_not_waited_for() -> None:
    job = Job(2, 1)
    view(job)
    job.now += LOOK_S
    job.scheduler.handle(b"launcher", wire.Lost("worker", 1, "was killed by SIGKILL", 0, False), job.now)
    assert job.scheduler.to_be_seen
    job.scheduler.tick(job.now + LOOK_S)
    assert not job.scheduler.to_be_seen


FETCHER = wire.Node("observer", 0, 5)


def noted(number: int, role: str = "worker", over: bool = False, size: int = 10) -> wire.TraceChunk:
    return wire.TraceChunk(wire.Node(role, number, 1), [], [], over, 1, 0, [bytes(size)])


def fetch(traces: Traces, after: int, now: float = 0.0) -> tuple[int, list[int], int, bool]:
    """Return the number of the first chunk, the ranks in the chunks, how many were dropped, and if there are more."""
    fetched = wire.decode(wire.encode(traces.fetch(wire.FetchTrace(wire.Sender(FETCHER, 1, 1), after), now)))
    return fetched.first, [made.node.rank for made in fetched.chunks], fetched.dropped, fetched.more


def test_chunks_stay_until_the_observer_says_that_it_has_them() -> None:
    traces = Traces(0.0)
    for number in range(3):
        traces.take(noted(number))
    assert fetch(traces, 0) == fetch(traces, 0) == (1, [0, 1, 2], 0, False)
    traces.take(noted(3))
    assert fetch(traces, 3) == (4, [3], 0, False)
    assert fetch(traces, 4) == (5, [], 0, False)


def test_beyond_the_limit_the_oldest_are_forgotten_and_counted() -> None:
    traces = Traces(0.0, most=3000)
    for number in range(5):
        traces.take(noted(number, size=1000))
    assert fetch(traces, 0) == (4, [3, 4], 3, False)


def test_an_answer_has_a_bounded_number_of_chunks() -> None:
    traces = Traces(0.0)
    for _ in range(MOST_CHUNKS + 1):
        traces.take(noted(0))
    first, ranks, _, more = fetch(traces, 0)
    assert (first, len(ranks), more) == (1, MOST_CHUNKS, True)
    assert fetch(traces, MOST_CHUNKS) == (MOST_CHUNKS + 1, [0], 0, False)


def test_the_chunks_of_a_later_start_have_later_numbers() -> None:
    before, after = Traces(0.0, start=1), Traces(0.0, start=2)
    for traces in (before, after):
        traces.take(noted(0))
    first, *_ = fetch(before, 0)
    assert fetch(after, first)[1] == [0]


def test_it_waits_for_an_observer_that_has_asked_lately_or_may_still_come() -> None:
    traces = Traces(100.0)
    assert not traces.awaited(100.0)
    traces.take(noted(0))
    assert traces.awaited(100.0 + FIRST_S - 1)
    assert not traces.awaited(100.0 + FIRST_S)
    fetch(traces, 0, now=200.0)
    assert traces.awaited(200.0)
    assert not traces.awaited(200.0 + ATTENTIVE_S)
    fetch(traces, 1, now=300.0)
    assert not traces.awaited(300.0)


def test_it_follows_the_workers_window() -> None:
    traces = Traces(0.0)
    opened = [traces.open]
    for made in (noted(0, "server"), noted(0), noted(1, over=True), noted(0, "server")):
        traces.take(made)
        opened.append(traces.open)
    assert opened == [None, None, True, False, False]


# ---- readers


class ReadersOnly:
    """A job's readers and stores, without its members."""

    def __init__(self, most: int = 2) -> None:
        self.stores = Stores(range(1), 2, Departures(0.0))
        self.servers: list[str] = []
        self.error: KVStoreError | None = None
        self.readers = Readers(most, "", Door(), self.stores, lambda: self.servers, lambda: self.error)
        self.now = 0.0

    def ask(self, message: wire.Message) -> Any:
        [(_, reply)] = self.readers.handle(b"reader", message, self.now)
        return reply

    def connect(self, nonce: int) -> Any:
        return self.ask(wire.Connect(sender(-1, role="reader", incarnation=nonce)))

    def init(self, *keys: str, store: int = 1, name: str | None = None) -> None:
        self.stores.serve(b"", wire.OpenStore(sender(), store, name=f"{store}" if name is None else name))
        specs = {"kinds": [0] * len(keys), "shapes": [[2000]], "dtypes": ["float32"]}
        self.stores.serve(b"", wire.Declare(sender(), store - 1, list(keys), **specs, bound=1000, longest=1 << 20))
        self.stores.serve(b"", wire.Ready(sender(), store - 1, list(keys)))


READER = sender(0, role="reader", incarnation=7)


def test_readers_are_numbered_and_told_where_the_servers_are() -> None:
    job = ReadersOnly()
    assert job.connect(7) == wire.Connected(1, 0, [])
    job.servers = ["a", "b"]
    assert job.connect(7) == wire.Connected(1, 0, ["a", "b"])
    assert job.connect(8).rank == 1


def test_one_more_than_there_may_be_is_refused_until_one_leaves() -> None:
    job = ReadersOnly(most=2)
    job.connect(7), job.connect(8)
    refused = job.connect(9)
    assert isinstance(refused, wire.Failure)
    assert "2 readers already" in refused.text
    assert job.ask(wire.Leave(READER, None)) == wire.Ack(1)
    assert job.connect(9).rank == 0


def test_a_reader_that_is_silent_does_not_count() -> None:
    job = ReadersOnly(most=1)
    job.connect(7)
    job.now = READERS_SILENT_S + 1
    assert job.connect(8).rank == 0


def test_keys_are_found_with_their_places() -> None:
    job = ReadersOnly()
    job.init("w", "v")
    found = job.ask(wire.FindKeys(READER, "1", ["v"]))
    assert isinstance(found, wire.KeysFound)
    assert (found.shapes, found.dtypes, found.tables, found.kinds) == ([[2000]], ["float32"], [None], [0])
    assert (found.counts, found.starts, found.stops, found.servers) == ([2], [0, 1024], [1024, 2000], [0, 1])
    assert job.ask(wire.ListKeys(READER, "1", 0)) == wire.KeysListed(1, ["w", "v"], False)


def test_many_keys_are_listed_page_by_page() -> None:
    job = ReadersOnly()
    job.init(*map(str, range(PAGE + 1)))
    first = job.ask(wire.ListKeys(READER, "1", 0))
    assert (len(first.keys), first.more) == (PAGE, True)
    assert job.ask(wire.ListKeys(READER, "1", PAGE)) == wire.KeysListed(1, [str(PAGE)], False)


@pytest.mark.parametrize("ordinal", [1, 2])
def test_what_is_not_there_is_no_fault_of_the_job(ordinal: int) -> None:
    job = ReadersOnly()
    job.init("w")
    reply = job.ask(wire.FindKeys(READER, f"{ordinal}", ["x"]))
    assert (reply.kind, "x" in reply.text or "no store 2" in reply.text) == ("KeyNotInitialized", True)


def test_values_are_not_here() -> None:
    assert "to the servers" in ReadersOnly().ask(wire.ReadValues(READER, 0, [], 0, [], 0)).text


def test_when_the_job_is_over_readers_are_told() -> None:
    job = ReadersOnly()
    job.error = NodeLost("worker 1 was killed by SIGKILL")
    reply = job.connect(7)
    assert (reply.kind, reply.text) == ("NodeLost", "worker 1 was killed by SIGKILL")
    assert job.ask(wire.Explain(READER, 1)).text == ""


def test_a_greeting_is_not_answered() -> None:
    assert ReadersOnly().readers.handle(b"reader", wire.Here(wire.Node("reader", 0, 7)), 0.0) == []


def test_a_reader_of_another_store_is_told_which_store_has_the_key() -> None:
    job = ReadersOnly()
    job.init("ours")
    job.init("weight", store=2)
    job.connect(7)
    said = {
        (store, key): job.ask(wire.FindKeys(READER, f"{store}", [key])).text
        for store in (1, 3)
        for key in ("weight", "x")
    }
    told = "store 2 has key 'weight': pass store=2 to kvstore.connect"
    assert said[1, "weight"] == f"key 'weight' has no value in store 1, which this reader reads; {told}"
    assert said[3, "weight"].endswith(f"or all have closed it; {told}")
    assert said[1, "x"] == "key 'x' has no value in this job yet; no worker has initialized it"
    assert said[3, "x"].endswith("or all have closed it")
    misspelled = job.ask(wire.FindKeys(READER, "2", ["wieght"])).text
    assert misspelled == "key 'wieght' has no value in this job yet; did you mean 'weight'?"
    job.init("weight", store=3)
    assert "stores 2, 3 have key 'weight': pass store=2" in job.ask(wire.FindKeys(READER, "1", ["weight"])).text


def test_stores_are_found_by_their_names_and_a_later_one_of_a_name_counts() -> None:
    job = ReadersOnly()
    made = [("", 1), ("workers", 2), ("1", 3), ("", 4), ("workers", 5)]  # which store of each worker it is
    for name, ordinal in made:
        job.init("w", store=ordinal, name=name)
    assert [job.ask(wire.FindKeys(READER, name, ["w"])).store for name in ("1", "workers")] == [2, 4]
    assert "stores 1, workers have key 'w': pass store=1" in job.ask(wire.FindKeys(READER, "2", ["w"])).text
    job.stores.close(0, 2)
    assert "store workers has key 'w': pass store='workers'" in job.ask(wire.FindKeys(READER, "1", ["w"])).text
    job.stores.close(0, 4)
    assert job.ask(wire.FindKeys(READER, "workers", ["w"])).kind == "KeyNotInitialized"
