"""The state of a job as the page is told it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from simulated_job import SimulatedJob, SimulatedSession

from kvstore.errors import NodeLost
from kvstore.observing.view import JobView
from servers.observer.watcher import Feed, JobWatcher


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
