"""The recording of a trace beside a job: it goes on through errors, and ends with the job, or with the rounds."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from noted import NotedJob, fetched
from trace_reader import ReadTrace
from viewed_job import view_of, worker
from waiting import until

from kvstore import wire
from kvstore.errors import ConfigError, DeadlineExceeded, KVStoreError, NodeLost, UsageError
from kvstore.job.valid_values import RoundWindow
from kvstore.observing.observer_session import UNCHANGED
from kvstore.observing.view import JobView
from servers.observer.trace_recording import (
    MISSING_S,
    MOST_TRIES,
    REFUSED_S,
    TraceRecording,
    are_over,
    notes_due_s,
    rounds_ahead,
)
from servers.tracing.trace_writer import TraceWriter


class Scheduler:
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

    def connect(self) -> Scheduler:
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


def test_it_goes_on_with_another_link_until_the_job_is_over_and_writes_the_file(tmp_path: Path) -> None:
    scheduler, path = Scheduler(), tmp_path / "trace.json"
    with TraceRecording(TraceWriter(path), scheduler.connect, scheduler.over, step_s=0.001):
        assert scheduler.over.wait(10)
    assert (scheduler.links, scheduler.closed) == (2, 2)
    assert set(scheduler.asked) == {UNCHANGED}
    assert ReadTrace.of(path).round_trips() == 2


def test_when_its_rounds_are_over_it_leaves_room_for_another_trace_though_the_job_goes_on(tmp_path: Path) -> None:
    scheduler, path, over = Scheduler(), tmp_path / "trace.json", threading.Event()
    TraceRecording(TraceWriter(path, RoundWindow(1, 30)), scheduler.connect, over, 0.001, scheduler.clock).run()
    assert not over.is_set()
    assert scheduler.round > 30
    assert set(scheduler.asked) == {UNCHANGED}, "members know the rounds"
    assert scheduler.closed == scheduler.links
    assert ReadTrace.of(path).round_trips() == 2


def test_it_records_only_if_it_is_told_a_file(tmp_path: Path) -> None:
    scheduler = Scheduler()
    assert TraceRecording.from_env({}, scheduler.connect, threading.Event()) is None
    env = {"KVSTORE_TRACE_FILE": str(tmp_path / "trace.json"), "KVSTORE_TRACE": "5-9"}
    scheduler.over.set()
    recording = TraceRecording.from_env(env, scheduler.connect, scheduler.over)
    assert recording is not None
    recording.run()
    assert ReadTrace.of(tmp_path / "trace.json").about["rounds"] == "5-9"


def test_where_nobody_says_when_the_job_ends_it_asks_for_rounds_and_ends_with_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scheduler, path = Scheduler(), tmp_path / "trace.json"
    scheduler.recording(path, RoundWindow(1, 30)).run()
    assert scheduler.asked[0] == RoundWindow(11, 40)
    assert set(scheduler.asked[1:-1]) == {RoundWindow(21, 50)}, "what was refused is chosen anew"
    assert scheduler.asked[-1] == RoundWindow(21, 21), "members note no more"
    assert ReadTrace.of(path).about["rounds"] == "21-50"
    assert f"{path} has 20 records" in capsys.readouterr().err


def test_where_rounds_were_faster_than_their_reports_it_takes_the_next(tmp_path: Path) -> None:
    scheduler, path = Scheduler(), tmp_path / "trace.json"
    scheduler.links, scheduler.fast = 1, 2
    scheduler.recording(path, RoundWindow(1, 5)).run()
    assert len(set(scheduler.asked[:-1])) == 3
    first = scheduler.asked[-1].first
    assert first in {span["args"]["round"] for span in ReadTrace.of(path).spans("worker 0", "pushpull")}


@pytest.mark.parametrize(("late", "asked"), [(2, 3), (99, MOST_TRIES)])
def test_where_workers_heard_of_the_rounds_too_late_it_takes_the_next(tmp_path: Path, late: int, asked: int) -> None:
    scheduler, path = Scheduler(), tmp_path / "trace.json"
    scheduler.links, scheduler.late = 1, late
    scheduler.recording(path, RoundWindow(1, 5)).run()
    assert len(set(scheduler.asked[:-1]) - {UNCHANGED}) == asked
    first = scheduler.asked[-1].first
    rounds = {span["args"]["round"] for span in ReadTrace.of(path).spans("worker 0", "pushpull")}
    assert rounds == {first + (late > asked)}, "nothing is left of the rounds before"


def test_rounds_that_are_over_are_an_error_at_once(tmp_path: Path) -> None:
    scheduler = Scheduler()
    with pytest.raises(ConfigError, match="rounds 3-9 are over: the job is in round 10"):
        scheduler.recording(tmp_path / "trace.json", RoundWindow(3, 9)).run()
    assert scheduler.links == 1


@pytest.mark.parametrize(
    ("refusal", "patience_s"), [(UsageError("written already"), REFUSED_S), (DeadlineExceeded("late", ()), MISSING_S)]
)
def test_who_never_gets_an_answer_gives_up(tmp_path: Path, refusal: KVStoreError, patience_s: float) -> None:
    scheduler = Scheduler(refusal)
    with pytest.raises(type(refusal)):
        scheduler.recording(tmp_path / "trace.json", RoundWindow(1, 9)).run()
    assert scheduler.now - 100.0 >= patience_s


def test_a_trace_that_fails_beside_a_page_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recording = Scheduler().recording(tmp_path / "trace.json", RoundWindow(3, 9))
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
