"""The state of a job as the page is told it."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated_job import SimulatedJob, SimulatedSession

from kvstore.errors import NodeLost
from kvstore.observing.view import JobView
from servers.observer.watcher import MOST_COLUMNS, Feed, History, JobWatcher, Timeline


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
