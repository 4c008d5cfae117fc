"""The state of a job as the page is told it, and the trace that is recorded beside it."""

from __future__ import annotations

import json
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from noted import NotedJob, fetched
from simulated_job import SimulatedJob, SimulatedSession
from trace_reader import ReadTrace
from viewed_job import view_of, worker
from waiting import until

from kvstore import wire
from kvstore.errors import ConfigError, DeadlineExceeded, KVStoreError, NodeLost, UsageError
from kvstore.job.valid_values import RoundWindow
from kvstore.observing.observer_session import UNCHANGED
from kvstore.observing.view import JobView
from servers.observer.page_snapshot import drawn, figures, snapshot, values
from servers.observer.trace_recording import (
    MISSING_S,
    MOST_TRIES,
    REFUSED_S,
    TraceRecording,
    are_over,
    notes_due_s,
    rounds_ahead,
)
from servers.observer.watcher import MOST_COLUMNS, Feed, History, JobWatcher, Timeline
from servers.tracing.trace_writer import TraceWriter

# ---- the state of a job as the page is told it


class Scheduler:
    """Answers, or not; counts the sessions with it."""

    def __init__(self) -> None:
        self.now = 0.5
        self.there = True
        self.sessions = 0
        self.closed = 0
        self.waited: list[float] = []
        self.job = SimulatedJob(workers=3, servers=2, straggler=1)

    def connect(self) -> Scheduler:
        self.sessions += 1
        return self

    def look(self) -> JobView:
        if not self.there:
            raise NodeLost("nobody listens")
        return SimulatedSession(self.job, lambda: self.now).look()

    def wait(self, seconds: float) -> None:
        self.waited.append(seconds)
        if not self.there:
            raise NodeLost("nobody listens")

    def wake(self) -> None:
        self.waited.append(0.0)

    def close(self) -> None:
        self.closed += 1


class Watched:
    def __init__(self) -> None:
        self.scheduler, self.feed = Scheduler(), Feed()
        self.watcher = JobWatcher(self.scheduler.connect, self.feed, "train.py")

    def told(self) -> dict[str, Any]:
        told: dict[str, Any] = json.loads(self.feed.after(0, 0.0)[1])
        return told


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_each_look_tells_the_page(watched: Watched) -> None:
    watched.scheduler.now = 100.0
    assert watched.watcher.look(7.0)
    told = watched.told()
    assert (told["kind"], told["title"], told["age"]) == ("view", "train.py", 100.0)
    assert [advice["about"] for advice in told["advice"]] == ["worker 1"]
    assert watched.watcher.answered == 7.0


def test_a_scheduler_that_does_not_answer_is_asked_anew(watched: Watched) -> None:
    watched.scheduler.there = False
    assert not watched.watcher.look(1.0)
    assert (watched.told()["kind"], watched.told()["text"], watched.told()["since"]) == (
        "silent",
        "nobody listens",
        None,
    )
    watched.scheduler.there = True
    assert watched.watcher.look(2.0)
    assert (watched.scheduler.sessions, watched.scheduler.closed) == (2, 1)
    watched.scheduler.there = False
    watched.watcher.look(5.0)
    assert watched.told()["since"] == 3.0


def test_it_waits_for_the_scheduler_as_long_as_there_is_a_link(watched: Watched) -> None:
    watched.watcher.wake()
    assert not watched.watcher.wait(1.0)
    watched.watcher.look(1.0)
    assert watched.watcher.wait(2.0)
    watched.watcher.wake()
    watched.scheduler.there = False
    assert watched.watcher.wait(3.0), "the next look tells what is wrong"
    watched.watcher.look(9.0)
    assert not watched.watcher.wait(4.0)
    assert watched.scheduler.waited == [2.0, 0.0, 3.0]


def test_another_scheduler_does_not_turn_back_the_time(watched: Watched) -> None:
    watched.scheduler.now = 100.0
    watched.watcher.look(10.0)
    watched.scheduler.now = 0.5  # it has begun anew
    watched.watcher.look(12.0)
    assert watched.told()["age"] == 102.0
    assert json.loads(watched.watcher.history("recent"))["times"] == [100.0, 102.0]


def test_the_end_is_the_last_that_is_told(watched: Watched) -> None:
    watched.watcher.look(1.0)
    watched.watcher.end("over")
    number, message, last = watched.feed.after(0, 0.0)
    assert (number, json.loads(message), last) == (2, {"kind": "over", "text": "over"}, True)


def test_the_history_has_the_jobs_columns_or_a_members(watched: Watched) -> None:
    for second in range(20):
        watched.scheduler.now = float(second) + 0.5
        watched.watcher.look(second)
    job = json.loads(watched.watcher.history("recent"))
    assert (job["width"], len(job["times"])) == (1.0, 20)
    assert {"rounds", "waiting", "value loss"} < set(job["columns"])
    assert not [name for name in job["columns"] if name.startswith(("worker 1", "server 0"))]
    member = json.loads(watched.watcher.history("all", "worker 1"))
    assert set(member["columns"]) == {"waiting", "traffic", "cores", "memory"}
    assert member["width"] == 5.0
    for unknown in (("yesterday", ""), ("recent", "worker 9"), ("recent", "loss")):
        with pytest.raises(LookupError):
            watched.watcher.history(*unknown)


def test_a_value_cannot_pass_for_a_members(watched: Watched) -> None:
    watched.scheduler.now = 30.0
    watched.watcher.look(1.0)
    names = json.loads(watched.watcher.history("recent"))["columns"]
    assert [name for name in names if name.startswith("value ")] == ["value loss", "value accuracy", "value epoch"]


def test_a_reader_gets_the_latest() -> None:
    feed = Feed()
    assert feed.after(0, 0.0) == (0, b"", False)
    feed.publish(b"a")
    feed.publish(b"b")
    assert feed.after(0, 1.0) == (2, b"b", False)
    assert feed.after(2, 0.0) == (2, b"", False)


def test_the_last_message_is_marked() -> None:
    feed = Feed()
    feed.publish(b"a")
    feed.close()
    feed.publish(b"b")
    assert feed.after(0, 1.0) == (1, b"a", True)
    assert feed.after(1, 1.0) == (1, b"", True)


def test_a_bucket_is_the_mean_of_what_was_measured_in_it() -> None:
    timeline = Timeline(10.0, 100)
    for at, value in ((0.0, 1.0), (9.9, 3.0), (10.0, 5.0), (31.0, 7.0)):
        timeline.add(at, {"rounds": value})
    drawing = timeline.drawing(["rounds"])
    assert list(drawing.times) == [0.0, 10.0, 30.0]
    assert list(drawing.columns["rounds"]) == [2.0, 5.0, 7.0]


def test_what_was_not_measured_is_no_number() -> None:
    timeline = Timeline(1.0, 100)
    timeline.add(0.0, {"a": 1.0})
    timeline.add(1.0, {"b": 2.0, "c": math.nan})
    timeline.add(2.0, {"a": 3.0})
    drawing = timeline.drawing(["a", "b", "c"])
    assert [math.isnan(value) for value in drawing.columns["a"]] == [False, True, False]
    assert [math.isnan(value) for value in drawing.columns["b"]] == [True, False, True]
    assert all(math.isnan(value) for value in drawing.columns["c"])


def test_the_oldest_are_forgotten() -> None:
    timeline = Timeline(1.0, 10)
    for at in range(1000):
        timeline.add(at, {"a": at})
    assert list(timeline.drawing(["a"]).columns["a"]) == list(range(989, 1000))


def test_from_the_beginning_buckets_grow_instead() -> None:
    timeline = Timeline(1.0, 16, grows=True)
    for at in range(1000):
        timeline.add(at, {"a": float(at)})
    drawing = timeline.drawing(["a"])
    assert drawing.times[0] == 0.0
    assert drawing.width_s == 64.0
    assert len(drawing.times) <= 17
    assert list(drawing.columns["a"]) == [time + 31.5 for time in drawing.times[:-1]] + [drawing.columns["a"][-1]]


@given(st.lists(st.floats(0, 1e5), min_size=1, max_size=200), st.booleans())
def test_columns_are_as_long_as_the_times(times: list[float], grows: bool) -> None:
    timeline = Timeline(3.0, 8, grows=grows)
    for number, at in enumerate(sorted(times)):
        timeline.add(at, {f"column {number % 3}": at})
    drawing = timeline.drawing([f"column {number}" for number in range(4)])
    assert {len(column) for column in drawing.columns.values()} == {len(drawing.times)}
    assert len(drawing.times) <= 9
    assert list(drawing.times) == sorted(set(drawing.times))


def test_there_are_so_many_columns_at_most() -> None:
    history = History()
    for second in range(3):
        history.add(second, {f"column {number}": 1.0 for number in range(MOST_COLUMNS + 5)})
    assert len(history.names) == MOST_COLUMNS


@pytest.mark.parametrize("name", ["recent", "hours", "all"])
def test_a_day_is_kept_in_so_many_points(name: str) -> None:
    history = History()
    for minute in range(24 * 60):
        history.add(60.0 * minute, {"rounds": 1.0})
    drawing = history.timelines[name].drawing(["rounds"])
    assert 100 < len(drawing.times) <= 601
    assert set(drawing.columns["rounds"]) == {1.0}


# ---- what the page is told of a job


JOB = SimulatedJob(workers=3, servers=2, straggler=1)


def test_rates_are_of_the_time_between_two_reports() -> None:
    told = snapshot(JOB.view(100.0))
    worker = told["workers"][0]
    assert (worker["name"], worker["state"], worker["rounds"], worker["rate"]) == ("worker 0", "ready", 1000, 10.0)
    assert len(worker["links"]) == 2
    assert sum(worker["links"]) == worker["sent"] + worker["received"]
    assert told["figures"]["rounds"] == 10.0
    assert (told["expected"]["worker"], len(told["servers"])) == (3, 2)


def test_it_says_where_each_process_runs() -> None:
    view = JOB.view(9.0)
    members = [replace(view.members[0], host="node7", pid=42), *view.members[1:]]
    first, second = snapshot(replace(view, members=members))["workers"][:2]
    assert (first["host"], first["pid"]) == ("node7", 42)
    assert (second["host"], second["pid"]) == ("", None)


def test_it_says_who_waits_for_whom() -> None:
    first, second = snapshot(JOB.view(100.0))["waiting"]
    assert (first["at"], first["waiting"], first["missing"], first["seconds"]) == ("server 0", [0, 2], [1], 0.04)
    assert second["at"] == "server 1"


def test_it_is_json_without_what_is_not() -> None:
    view = JOB.view(0.5)  # each member has reported once
    told = json.loads(json.dumps(snapshot(view), allow_nan=False))
    assert told["figures"]["rounds"] is None
    assert told["workers"][0]["waiting"] is None
    assert told["figures"]["held"] > 0


def test_members_without_reports_are_there() -> None:
    view = JOB.view(9.0)
    view = replace(view, members=[replace(member, worker=None, server=None) for member in view.members])
    told = snapshot(view)
    assert [member["name"] for member in told["workers"] + told["servers"]] == [
        "worker 0",
        "worker 1",
        "worker 2",
        "server 0",
        "server 1",
    ]
    assert json.dumps(told, allow_nan=False)
    assert drawn(view) == {}


def test_the_lost_do_not_count() -> None:
    view = SimulatedJob(workers=3, servers=2, killed=1).view(100.0)
    whole = SimulatedJob(workers=3, servers=2).view(100.0)
    assert snapshot(view)["workers"][1]["state"] == "lost"
    assert (figures(view)["worker memory"], figures(whole)["worker memory"]) == (802_100_000, 1_203_150_000)
    assert "worker 1 memory" not in drawn(view)
    assert "worker 1 memory" in drawn(whole)


def test_it_says_who_comes_last_and_is_awaited() -> None:
    workers = snapshot(JOB.view(100.0))["workers"]
    assert [worker["last"] for worker in workers] == [0.33, 1.0, 0.33]
    assert [worker["alone"] for worker in workers] == [0.0, 0.4, 0.0]


def test_what_programs_log_is_averaged_over_the_workers() -> None:
    assert values(JOB.view(0.0001))["loss"] == 2.4 - 2.3 * (1 - 2.718281828459045 ** (-0.5 / 900))


def test_it_has_the_advice() -> None:
    (advice,) = snapshot(JOB.view(100.0))["advice"]
    assert (advice["about"], advice["severity"]) == ("worker 1", "warning")
    assert advice["kind"].startswith("straggler")
    assert "worker 1" in advice["text"]


# ---- the recording of a trace beside a job: it goes on through errors, and ends with the job, or with the rounds


class TracedScheduler:
    """Answers at the second link that is made to it; the job is over when all has been fetched.

    Its workers are in round ``round``, and do ten more between two looks.
    """

    def __init__(self, refusal: KVStoreError | None = None) -> None:
        self.job = NotedJob()
        self.job.round(1)
        self.over = threading.Event()
        self.links = 0
        self.closed = 0
        self.round = 0
        self.now = 100.0
        self.asked: list[RoundWindow] = []
        self.refusal = refusal
        self.noted = UNCHANGED
        self.fast = 0  # how often rounds are over before workers know of them
        self.late = 0  # how often workers hear of rounds when they are in them

    def connect(self) -> TracedScheduler:
        self.links += 1
        return self

    def look(self) -> JobView:
        self.round += 10
        return view_of([worker(0, rounds=self.round)])

    def fetch_trace(self, after: int, rounds: RoundWindow = UNCHANGED) -> wire.TraceFetched:
        self.asked.append(rounds)
        if self.links == 1:
            raise NodeLost("nobody listens")
        if self.refusal is not None:
            raise self.refusal
        if rounds not in (UNCHANGED, self.noted) and rounds.first < rounds.last:
            self.noted = rounds
            if self.fast:
                self.fast -= 1
            else:
                self.job.round(rounds.first + min(1, self.late))
                self.late -= min(1, self.late)
        chunks = self.job.chunks()
        if after and not chunks:
            self.over.set()
        return fetched(chunks, after + 1)

    def close(self) -> None:
        self.closed += 1

    def clock(self) -> float:
        self.now += 1.0
        return self.now

    def recording(self, path: Path, rounds: RoundWindow) -> TraceRecording:
        return TraceRecording(TraceWriter(path, rounds), self.connect, None, 0.001, self.clock)


def run(recording: TraceRecording) -> None:
    """In a thread, which lets all others go first for ever: this thread would do so in all later tests."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(recording.run).result()


def test_it_goes_on_with_another_link_until_the_job_is_over_and_writes_the_file(tmp_path: Path) -> None:
    scheduler, path = TracedScheduler(), tmp_path / "trace.json"
    with TraceRecording(TraceWriter(path), scheduler.connect, scheduler.over, step_s=0.001):
        assert scheduler.over.wait(10)
    assert (scheduler.links, scheduler.closed) == (2, 2)
    assert set(scheduler.asked) == {UNCHANGED}
    assert ReadTrace.of(path).round_trips() == 2


def test_when_its_rounds_are_over_it_leaves_room_for_another_trace_though_the_job_goes_on(tmp_path: Path) -> None:
    scheduler, path, over = TracedScheduler(), tmp_path / "trace.json", threading.Event()
    run(TraceRecording(TraceWriter(path, RoundWindow(1, 30)), scheduler.connect, over, 0.001, scheduler.clock))
    assert not over.is_set()
    assert scheduler.round > 30
    assert set(scheduler.asked) == {UNCHANGED}, "members know the rounds"
    assert scheduler.closed == scheduler.links
    assert ReadTrace.of(path).round_trips() == 2


def test_it_records_only_if_it_is_told_a_file(tmp_path: Path) -> None:
    scheduler = TracedScheduler()
    assert TraceRecording.from_env({}, scheduler.connect, threading.Event()) is None
    env = {"KVSTORE_TRACE_FILE": str(tmp_path / "trace.json"), "KVSTORE_TRACE": "5-9"}
    scheduler.over.set()
    recording = TraceRecording.from_env(env, scheduler.connect, scheduler.over)
    assert recording is not None
    run(recording)
    assert ReadTrace.of(tmp_path / "trace.json").about["rounds"] == "5-9"


def test_where_nobody_says_when_the_job_ends_it_asks_for_rounds_and_ends_with_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scheduler, path = TracedScheduler(), tmp_path / "trace.json"
    run(scheduler.recording(path, RoundWindow(1, 30)))
    assert scheduler.asked[0] == RoundWindow(11, 40)
    assert set(scheduler.asked[1:-1]) == {RoundWindow(21, 50)}, "what was refused is chosen anew"
    assert scheduler.asked[-1] == RoundWindow(21, 21), "members note no more"
    assert ReadTrace.of(path).about["rounds"] == "21-50"
    assert f"{path} has 20 records" in capsys.readouterr().err


def test_where_rounds_were_faster_than_their_reports_it_takes_the_next(tmp_path: Path) -> None:
    scheduler, path = TracedScheduler(), tmp_path / "trace.json"
    scheduler.links, scheduler.fast = 1, 2
    run(scheduler.recording(path, RoundWindow(1, 5)))
    assert len(set(scheduler.asked[:-1])) == 3
    first = scheduler.asked[-1].first
    assert first in {span["args"]["round"] for span in ReadTrace.of(path).spans("worker 0", "pushpull")}


@pytest.mark.parametrize(("late", "asked"), [(2, 3), (99, MOST_TRIES)])
def test_where_workers_heard_of_the_rounds_too_late_it_takes_the_next(tmp_path: Path, late: int, asked: int) -> None:
    scheduler, path = TracedScheduler(), tmp_path / "trace.json"
    scheduler.links, scheduler.late = 1, late
    run(scheduler.recording(path, RoundWindow(1, 5)))
    assert len(set(scheduler.asked[:-1]) - {UNCHANGED}) == asked
    first = scheduler.asked[-1].first
    rounds = {span["args"]["round"] for span in ReadTrace.of(path).spans("worker 0", "pushpull")}
    assert rounds == {first + (late > asked)}, "nothing is left of the rounds before"


def test_rounds_that_are_over_are_an_error_at_once(tmp_path: Path) -> None:
    scheduler = TracedScheduler()
    with pytest.raises(ConfigError, match="rounds 3-9 are over: the job is in round 10"):
        run(scheduler.recording(tmp_path / "trace.json", RoundWindow(3, 9)))
    assert scheduler.links == 1


@pytest.mark.parametrize(
    ("refusal", "patience_s"), [(UsageError("written already"), REFUSED_S), (DeadlineExceeded("late", ()), MISSING_S)]
)
def test_who_never_gets_an_answer_gives_up(tmp_path: Path, refusal: KVStoreError, patience_s: float) -> None:
    scheduler = TracedScheduler(refusal)
    with pytest.raises(type(refusal)):
        run(scheduler.recording(tmp_path / "trace.json", RoundWindow(1, 9)))
    assert scheduler.now - 100.0 >= patience_s


def test_a_trace_that_fails_beside_a_page_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recording = TracedScheduler().recording(tmp_path / "trace.json", RoundWindow(3, 9))
    with recording:
        until(lambda: recording.failure is not None, "the failure")
    assert "trace: rounds 3-9 are over" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wanted", "rounds"),
    [
        ((1, 20), (515, 534)),  # 10 a second, 0.4 s since the report, and a second ahead
        ((500, 600), (500, 600)),
        ((400, 600), (400, 600)),  # what is left of them
        ((501, 501), (501, 501)),
    ],
)
def test_a_number_counts_from_now_on(wanted: tuple[int, int], rounds: tuple[int, int]) -> None:
    view = view_of(
        [worker(0, before={"rounds": 400}, rounds=500), worker(1, rounds=490), worker(2, "lost", rounds=900)]
    )
    assert rounds_ahead(view, RoundWindow(*wanted)) == rounds


def test_before_the_first_round_there_is_nothing_to_count_from() -> None:
    assert rounds_ahead(view_of([]), RoundWindow(1, 20)) == (1, 20)
    assert rounds_ahead(view_of([worker(0, rounds=0)]), RoundWindow(1, 20)) == (1, 20)


def test_rounds_that_are_over_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"rounds 3-9 are over: the job is in round 50;.*FILE:100"):
        rounds_ahead(view_of([worker(0, rounds=50)]), RoundWindow(3, 9))


def test_they_are_over_when_all_who_are_at_work_have_passed_them() -> None:
    rounds = RoundWindow(5, 9)
    assert not are_over(view_of([worker(0, rounds=10), worker(1, rounds=9)]), rounds)
    assert are_over(view_of([worker(0, rounds=10), worker(1, "left", rounds=9)]), rounds)
    assert are_over(view_of([worker(0, "left", rounds=3)]), rounds), "nobody is at work any more"
    assert not are_over(view_of([]), rounds), "nobody has begun"


def test_notes_come_later_where_beats_are_rare() -> None:
    assert notes_due_s(view_of([worker(0)])) == pytest.approx(2.8)
    assert notes_due_s(view_of([])) == 2.0
