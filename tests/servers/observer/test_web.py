"""The page's web server, asked over sockets."""

from __future__ import annotations

import gzip
import http.client
import json
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from kvstore.errors import UsageError
from servers.observer import web
from servers.observer.access import Access
from servers.observer.watcher import Feed

TOKEN, SESSION = "t" * 43, "s" * 43


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
