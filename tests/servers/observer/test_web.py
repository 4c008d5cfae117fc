"""The page's server: who may read, what it answers, and its loop."""

from __future__ import annotations

import gzip
import http.client
import json
import re
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from http.client import HTTPResponse
from pathlib import Path

import pytest
from simulated_job import SimulatedJob, SimulatedSession
from waiting import LONG

from kvstore.errors import ConfigError, NodeLost, UsageError
from kvstore.job.place import ObservingPlace
from kvstore.observing.observer_session import ObserverSession
from servers.observer import observer_process, web
from servers.observer.access import Access, Entrance, Refusal
from servers.observer.metrics import JobDescription
from servers.observer.observer_process import PageServing, run_observer, serve
from servers.observer.watcher import Feed

# ---- who may read the page


TOKEN, SESSION = "t" * 43, "s" * 43
FOLDER = "/f4lder/"
ACCESS = Access(TOKEN, SESSION, 8080, FOLDER)
HOST = {"host": "127.0.0.1:8080"}
COOKIE = {**HOST, "cookie": f"other=1; kvstore-8080={SESSION}"}


def status(verdict: Entrance | Refusal | None) -> int:
    return verdict.status if isinstance(verdict, Refusal) else 303 if verdict else 200


def test_the_token_becomes_a_cookie_that_only_this_page_gets() -> None:
    verdict = ACCESS.judge("/", f"token={TOKEN}", HOST)
    assert isinstance(verdict, Entrance)
    assert verdict.cookie == f"kvstore-8080={SESSION}; HttpOnly; SameSite=Strict; Path={FOLDER}"
    assert verdict.folder == FOLDER
    assert TOKEN not in verdict.cookie


def test_repr_has_no_secret() -> None:
    assert TOKEN not in repr(ACCESS)
    assert SESSION not in repr(ACCESS)
    assert FOLDER not in repr(ACCESS)


def test_addresses_in_the_folder_are_those_of_the_page() -> None:
    assert [ACCESS.inside(path) for path in (FOLDER, f"{FOLDER}events", "/events", "/", "/f4lder")] == [
        "/",
        "/events",
        "/events",
        "/",
        "/f4lder",
    ]


@pytest.mark.parametrize(
    "headers",
    [
        COOKIE,
        {**COOKIE, "host": "localhost:9999"},  # by ssh -L from another port
        {**COOKIE, "origin": "http://127.0.0.1:8080", "sec-fetch-site": "same-origin"},
        {**HOST, "authorization": f"Bearer {TOKEN}"},
    ],
)
def test_who_may_read(headers: dict[str, str]) -> None:
    assert ACCESS.judge("/events", "", headers) is None


@pytest.mark.parametrize(
    ("path", "query", "headers", "why"),
    [
        ("/", "", HOST, 403),
        ("/", "token=", HOST, 403),
        ("/", f"token={TOKEN[1:]}", HOST, 403),
        ("/", "token=%C3%A4", HOST, 403),
        ("/", f"token={TOKEN}", {"host": "evil.example:8080"}, 421),
        ("/", f"token={TOKEN}", {"host": "127.0.0.1.evil.example"}, 421),
        ("/", f"token={TOKEN}", {}, 421),
        ("/", f"token={TOKEN}", {**HOST, "origin": "http://evil.example"}, 403),
        ("/events", f"token={TOKEN}", HOST, 403),  # the token in an address is for the page alone
        ("/events", "", {**HOST, "cookie": f"kvstore-8081={SESSION}"}, 403),
        ("/events", "", {**HOST, "cookie": f"kvstore-8080={TOKEN}"}, 403),
        ("/events", "", {**COOKIE, "host": "evil.example"}, 421),
        ("/events", "", {**COOKIE, "origin": "http://127.0.0.1:9999"}, 403),
        ("/events", "", {**COOKIE, "origin": "null"}, 403),
        ("/events", "", {**COOKIE, "sec-fetch-site": "same-site"}, 403),  # a page of another port of this machine
        ("/events", "", {**COOKIE, "sec-fetch-site": "cross-site"}, 403),
        ("/events", "", {**HOST, "authorization": f"Bearer {SESSION}"}, 403),
        ("/events", "", {**HOST, "authorization": f"Basic {TOKEN}"}, 403),
    ],
)
def test_who_may_not(path: str, query: str, headers: dict[str, str], why: int) -> None:
    assert status(ACCESS.judge(path, query, headers)) == why


# ---- the page's web server, asked over sockets


class Site:
    """A web server, and a client of it that has the cookie."""

    def __init__(self) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        self.feed = Feed()
        access = Access(TOKEN, SESSION, self.port, "/f4lder/")
        self.web = web.Web(
            listener, access, web.page_files(), self.feed, {"/double": self.double, "/lacks": self.lacks}
        )
        self.web.start()

    @staticmethod
    def double(query: str) -> tuple[str, bytes]:
        if not query:
            raise LookupError
        return "text/plain", 2 * query.encode()

    @staticmethod
    def lacks(query: str) -> tuple[str, bytes]:
        raise UsageError("pip install it")

    def ask(
        self, path: str, headers: dict[str, str] | None = None, method: str = "GET", *, known: bool = True
    ) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        cookie = {"Cookie": f"kvstore-{self.port}={SESSION}"} if known else {}
        connection.request(method, path, headers={**cookie, **(headers or {})})
        return connection.getresponse()


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    yield site
    site.feed.close()
    site.web.close()


def test_the_address_with_the_token_leads_to_the_page(site: Site) -> None:
    answer = site.ask(f"/?token={TOKEN}", known=False)
    assert (answer.status, answer.getheader("Location")) == (303, "/f4lder/")
    page = site.ask("/f4lder/", {"Cookie": str(answer.getheader("Set-Cookie")).split(";")[0]}, known=False)
    assert page.status == 200
    assert b"<!doctype html>" in page.read()[:20]


@pytest.mark.parametrize(
    ("path", "headers", "known", "status"),
    [
        ("/", {}, False, 403),
        ("/?token=wrong", {}, False, 403),
        ("/events", {}, False, 403),
        ("/", {"Host": "evil.example"}, True, 421),
        ("/events", {"Origin": "http://evil.example"}, True, 403),
        ("/nothing", {}, True, 404),
        ("/../web.py", {}, True, 404),
        ("/double", {}, True, 404),
        ("/lacks", {}, True, 501),
    ],
)
def test_what_is_refused(site: Site, path: str, headers: dict[str, str], known: bool, status: int) -> None:
    assert site.ask(path, headers, known=known).status == status


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "BREW"])
def test_nothing_can_be_done_but_reading(site: Site, method: str) -> None:
    assert site.ask("/", method=method).status == 405


def test_each_answer_forbids_what_the_page_does_not_need(site: Site) -> None:
    for path, known in (("/", True), ("/page.js", True), ("/nothing", True), ("/", False), (f"/?token={TOKEN}", False)):
        answer = site.ask(path, known=known)
        policy = str(answer.getheader("Content-Security-Policy"))
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert answer.getheader("X-Content-Type-Options") == "nosniff"
        assert answer.getheader("Cache-Control") == "no-store"
        assert answer.getheader("Access-Control-Allow-Origin") is None


def test_files_come_in_fewer_bytes_to_who_asks(site: Site) -> None:
    plain = site.ask("/uplot.js").read()
    answer = site.ask("/uplot.js", {"Accept-Encoding": "gzip, br"})
    assert answer.getheader("Content-Encoding") == "gzip"
    assert gzip.decompress(answer.read()) == plain


def test_answers_are_asked_with_the_query(site: Site) -> None:
    assert site.ask("/double?ab").read() == b"abab"


def test_a_stream_has_the_latest_message_and_each_after_it(site: Site) -> None:
    site.feed.publish(b'{"n":1}')
    site.feed.publish(b'{"n":2}')
    stream = site.ask("/events")
    assert str(stream.getheader("Content-Type")).startswith("text/event-stream")
    assert json.loads(stream.readline()[6:]) == {"n": 2}
    site.feed.publish(b'{"n":3}')
    assert stream.readline() == b"\n"
    assert json.loads(stream.readline()[6:]) == {"n": 3}
    site.feed.close()
    assert stream.read() == b"\n: still here\n\n"


def test_there_are_so_many_streams_at_most(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "MOST_STREAMS", 1)
    site.feed.publish(b"1")
    first = site.ask("/events")
    assert first.readline()
    assert site.ask("/events").status == 503


def test_who_takes_too_long_to_ask_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "REQUEST_S", 0.05)
    site = Site()
    try:
        with socket.create_connection(("127.0.0.1", site.port), timeout=10) as slow:
            slow.sendall(b"GET / HTTP/1.1\r\nHost: ")
            assert slow.recv(1024) == b""
    finally:
        site.web.close()


def test_there_are_so_many_connections_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "MOST_CONNECTIONS", 1)
    site = Site()
    try:
        site.feed.publish(b"1")
        first = site.ask("/events")
        assert first.readline()
        with socket.create_connection(("127.0.0.1", site.port), timeout=10) as second:
            assert second.recv(1024) == b"", "there is no room for it: whoever may read keeps its turn"
        site.feed.publish(b"2")
        assert first.readline() == b"\n"
        assert first.readline() == b"data: 2\n"
    finally:
        site.feed.close()
        site.web.close()


def test_slow_strangers_do_not_take_the_owners_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "MOST_CONNECTIONS", 4)
    site = Site()
    try:
        with ExitStack() as stack:
            for _ in range(10):
                slow = stack.enter_context(socket.create_connection(("127.0.0.1", site.port), timeout=10))
                slow.sendall(b"GET /page.js HTTP/1.1\r\nHost: ")
            for _ in range(20):
                assert site.ask("/double?ab").read() == b"abab"
    finally:
        site.web.close()


@pytest.mark.parametrize(
    "request_line", [b"\x00\xff\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"G" * 70_000]
)
def test_what_is_not_http_is_refused(site: Site, request_line: bytes) -> None:
    with socket.create_connection(("127.0.0.1", site.port), timeout=10) as connection:
        connection.sendall(request_line)
        assert connection.recv(1024)[:10] in (b"HTTP/1.1 4", b"HTTP/1.1 5")


MOST_BYTES = 60_000  # of all that a browser fetches, as it is sent


def test_the_page_is_small() -> None:
    assert sum(len(file.small) for file in web.page_files().values()) <= MOST_BYTES


def test_every_file_is_served() -> None:
    served = {name for name, _ in web.NAMES.values()}
    there = {str(path.relative_to(web.FOLDER)) for path in web.FOLDER.rglob("*.*")}
    assert served == there


def test_the_page_has_nothing_from_elsewhere() -> None:
    known = {"http://www.w3.org/2000/svg", "https://github.com/leeoniya/uPlot"}
    for address, file in web.page_files().items():
        found = set(re.findall(r"https?://[^\s\"')]+", file.plain.decode()))
        assert found <= known, address


def test_nothing_is_written_as_markup() -> None:
    for address, file in web.page_files().items():
        text = file.plain.decode()
        for forbidden in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
            assert forbidden not in text, address
    page = web.page_files()["/"].plain.decode()
    assert " style=" not in page
    assert not re.search(r"<script(?![^>]* src=)|<style| on[a-z]+=", page)


# ---- the observer's loop: it serves the page of a simulated job until that is over


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
