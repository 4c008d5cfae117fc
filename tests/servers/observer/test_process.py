"""The observer's loop: it serves the page of a simulated job until that is over."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.client import HTTPResponse
from pathlib import Path

import pytest
from simulated_job import SimulatedJob, SimulatedSession
from waiting import LONG

from kvstore.errors import ConfigError, NodeLost
from kvstore.job.place import ObservingPlace
from kvstore.observing.observer_session import ObserverSession
from servers.observer import observer_process
from servers.observer.metrics import JobDescription
from servers.observer.observer_process import PageServing, run_observer, serve

TOKEN = "t" * 43


class Running:
    """A page that is served, in a thread."""

    def __init__(self, over: threading.Event | None) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        self.over = over
        self.raised: BaseException | None = None
        self.missing = False
        self.looked = threading.Event()
        began, job = time.monotonic(), SimulatedJob(2, 2)

        def age() -> float:
            if self.missing:
                raise NodeLost("nobody listens")
            self.looked.set()
            return 20.0 + time.monotonic() - began

        self.session = SimulatedSession(job, age)

        def connect() -> ObserverSession:
            return self.session

        page = PageServing(listener, TOKEN, JobDescription("job", "train.py"), over)
        self.thread = threading.Thread(target=self._serve, args=(page, connect), daemon=True)

    def _serve(self, page: PageServing, connect: object) -> None:
        try:
            serve(page, connect, missing_s=0.2)  # type: ignore[arg-type]
        except NodeLost as error:
            self.raised = error

    def open(self, path: str) -> HTTPResponse:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", headers=headers)
        answer: HTTPResponse = urllib.request.urlopen(request, timeout=10)
        return answer

    def get(self, path: str) -> bytes:
        with self.open(path) as answer:
            return answer.read()


@pytest.fixture
def running() -> Iterator[Running]:
    made = Running(threading.Event())
    made.thread.start()
    with made.open("/events") as stream:
        assert stream.readline()  # there is something to see
    yield made
    assert made.over is not None
    made.over.set()
    made.thread.join(10)
    assert not made.thread.is_alive()


def test_the_page_is_there_until_the_job_is_over(running: Running) -> None:
    assert running.over is not None
    with running.open("/events") as stream:
        first = json.loads(stream.readline()[6:])
        assert (first["kind"], len(first["workers"])) == ("view", 2)
        running.over.set()
        rest = stream.read()
    assert b'{"kind":"over"' in rest


def test_what_the_scheduler_says_unasked_has_it_look_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for pause in ("LOOK_S", "WATCHED_S"):
        monkeypatch.setattr(observer_process, pause, LONG)
    made = Running(threading.Event())
    made.thread.start()
    with made.open("/events") as stream:
        assert stream.readline()
        assert stream.readline() == b"\n"
        made.session.wake()
        assert json.loads(stream.readline()[6:])["kind"] == "view"
    assert made.over is not None
    made.over.set()
    made.thread.join(LONG / 2)
    assert not made.thread.is_alive()


def test_it_answers_with_histories_metrics_and_the_board(running: Running) -> None:
    assert b"<title>" in running.get("/")
    assert set(json.loads(running.get("/history?span=hours&member=server+0"))) == {"width", "times", "columns"}
    assert b"kvstore_" in running.get("/metrics")
    assert json.loads(running.get("/grafana/board.json"))


def test_without_anybody_who_says_it_a_silent_scheduler_means_that_the_job_is_over() -> None:
    made = Running(None)
    made.thread.start()
    assert made.looked.wait(10)
    made.missing = True
    made.thread.join(10)
    assert not made.thread.is_alive()
    assert made.raised is None


def test_a_scheduler_that_never_answers_is_an_error() -> None:
    made = Running(None)
    made.missing = True
    made.thread.start()
    made.thread.join(10)
    assert isinstance(made.raised, NodeLost)


@pytest.mark.parametrize("jobs", [0, 2])
def test_without_a_name_there_must_be_one_job(monkeypatch: pytest.MonkeyPatch, jobs: int) -> None:
    places = [ObservingPlace("ipc:///t/scheduler", job=f"job-{number}", pid=100 + number) for number in range(jobs)]
    monkeypatch.setattr(observer_process, "jobs_here", lambda _: (places, []))
    with pytest.raises(ConfigError, match="KVSTORE_OBSERVE") as caught:
        run_observer({})
    assert ("101 (job-1)" in str(caught.value)) == bool(jobs)


def test_a_name_must_be_that_of_a_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(observer_process, "jobs_here", lambda _: ([], []))
    for name in ("7", str(tmp_path)):
        with pytest.raises(ConfigError):
            run_observer({"KVSTORE_OBSERVE": name})


def test_an_interrupt_that_was_ignored_at_the_start_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # `kvstore-status ... --page &` in a script
    try:
        with pytest.raises(ConfigError):
            run_observer({"KVSTORE_OBSERVE": "/nowhere"})
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
