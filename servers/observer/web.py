"""The page's web server: 127.0.0.1 only, GET only, a bounded number of connections, each with deadlines."""

from __future__ import annotations

import gzip
import io
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from kvstore.errors import UsageError
from servers.observer.access import Access, Entrance
from servers.observer.watcher import Feed

MOST_CONNECTIONS = 48
MOST_STREAMS = 12
REQUEST_S = 10.0  # for a client to say what it wants
SEND_S = 10.0  # for a client to take a piece of the answer
KEEP_ALIVE_S = 5.0  # between two signs of life in a stream of events

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
_ALWAYS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Connection": "close",
}

# Answers a request for an address with its query: content type and body. It raises LookupError if it knows no such
# thing, and UsageError, with what to do, if it lacks a package.
Answer = Callable[[str], tuple[str, bytes]]

FOLDER = Path(__file__).with_name("page")
NAMES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/figures.js": ("figures.js", "text/javascript; charset=utf-8"),
    "/tables.js": ("tables.js", "text/javascript; charset=utf-8"),
    "/charts.js": ("charts.js", "text/javascript; charset=utf-8"),
    "/links.js": ("links.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
    "/uplot.js": ("uplot/uplot.js", "text/javascript; charset=utf-8"),
    "/uplot.css": ("uplot/uplot.css", "text/css; charset=utf-8"),
}


@dataclass(frozen=True)
class PageFile:
    """A file, as it is and compressed, and its content type."""

    plain: bytes = field(repr=False)
    small: bytes = field(repr=False)
    content_type: str


def page_files() -> dict[str, PageFile]:
    files = {}
    for address, (name, content_type) in NAMES.items():
        plain = (FOLDER / name).read_bytes()
        files[address] = PageFile(plain, gzip.compress(plain, 9, mtime=0), content_type)
    return files


class Web(ThreadingHTTPServer):
    """Serves the page, in threads of its own, at ``listener``, which is this object's from now on."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = MOST_CONNECTIONS

    def __init__(
        self,
        listener: socket.socket,
        access: Access,
        files: Mapping[str, PageFile],
        feed: Feed,
        answers: Mapping[str, Answer],
    ) -> None:
        super().__init__(listener.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.access, self.files, self.feed, self.answers = access, files, feed, answers
        self._lock = threading.Lock()
        self._open = 0  # connections
        self._strangers: dict[socket.socket, None] = {}  # not admitted yet, the oldest first
        self.streams = 0  # of events, that are open

    def start(self) -> None:
        threading.Thread(target=self.serve_forever, args=(0.2,), name="web", daemon=True).start()

    def close(self, patience_s: float = 0.5) -> None:
        """Serve no longer. Streams of events get so much time to send what is the last."""
        deadline = time.monotonic() + patience_s
        while self.streams and time.monotonic() < deadline:
            time.sleep(0.01)
        self.shutdown()
        self.server_close()

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Whether there is room for one more connection.

        The connection that has been silent for longest goes first. Otherwise slow strangers would take the turn of the
        owner, whose requests come at once.
        """
        with self._lock:
            if self._open >= MOST_CONNECTIONS:
                oldest = next(iter(self._strangers), None)
                if oldest is None:
                    return False
                del self._strangers[oldest]
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread reads the end, and closes it
            self._open += 1
            self._strangers[request] = None
        return True

    def admit(self, request: socket.socket) -> None:
        with self._lock:
            self._strangers.pop(request, None)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._open -= 1
                self._strangers.pop(request, None)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: clients go away when they like, and lines of theirs have no place in the output of a job."""

    def open_stream(self) -> bool:
        """Return whether there may be one more stream of events."""
        with self._lock:
            if self.streams >= MOST_STREAMS:
                return False
            self.streams += 1
            return True

    def close_stream(self) -> None:
        with self._lock:
            self.streams -= 1


class _Patient(io.RawIOBase):
    """Reads from a socket until a deadline, however slowly the bytes come."""

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self._connection, self._deadline = connection, deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the request has not come in time")
        self._connection.settimeout(left)
        return self._connection.recv_into(buffer)


class _Handler(BaseHTTPRequestHandler):
    server: Web
    protocol_version = "HTTP/1.1"
    server_version = "kvstore"
    sys_version = ""

    def setup(self) -> None:
        super().setup()
        self.rfile = io.BufferedReader(_Patient(self.connection, time.monotonic() + REQUEST_S))

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: addresses may have the token."""

    def do_GET(self) -> None:
        self.close_connection = True
        self.connection.settimeout(SEND_S)
        path, _, query = self.path.partition("?")
        headers = {name.lower(): value for name, value in self.headers.items()}
        # Of two Host or Cookie headers, the check could read one and a proxy before it the other.
        if len(headers) != len(self.headers):
            self._refuse(400, "a header came twice")
            return
        verdict = self.server.access.judge(path, query, headers)
        if verdict is None or isinstance(verdict, Entrance):
            self.server.admit(self.connection)
        if isinstance(verdict, Entrance):
            self._send(
                303, "text/plain; charset=utf-8", b"", {"Location": verdict.folder, "Set-Cookie": verdict.cookie}
            )
        elif verdict is not None:
            self._refuse(verdict.status, verdict.text)
        elif (path := self.server.access.inside(path)) == "/events":
            self._stream()
        elif (file := self.server.files.get(path)) is not None:
            small = "gzip" in headers.get("accept-encoding", "")
            encoding = {"Content-Encoding": "gzip"} if small else {}
            self._send(200, file.content_type, file.small if small else file.plain, encoding)
        elif (answer := self.server.answers.get(path)) is not None:
            self._answer(answer, query)
        else:
            self._refuse(404, "there is no such page")

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse what is not HTTP, or not GET, in the same words for all."""
        self.close_connection = True
        code, text = (405, "this page can only be read") if code == 501 else (code, "this is not a request")
        self.connection.settimeout(SEND_S)
        with suppress(OSError):
            self._refuse(code, text)

    def _answer(self, answer: Answer, query: str) -> None:
        try:
            content_type, body = answer(query)
        except (LookupError, ValueError):
            self._refuse(404, "there is no such page")
        except UsageError as error:
            self._refuse(501, str(error))
        else:
            self._send(200, content_type, body)

    def _stream(self) -> None:
        """Send each message as an event, until the client goes away."""
        if not self.server.open_stream():
            self._refuse(503, f"the page is open {MOST_STREAMS} times already; close one")
            return
        try:
            self._head(200, "text/event-stream; charset=utf-8", {})
            number, last = 0, False
            while not last:
                number, message, last = self.server.feed.after(number, KEEP_ALIVE_S)
                self.wfile.write(b"data: %b\n\n" % message if message else b": still here\n\n")
                self.wfile.flush()
        finally:
            self.server.close_stream()

    def _refuse(self, status: int, text: str) -> None:
        self._send(status, "text/plain; charset=utf-8", f"{text}\n".encode())

    def _send(self, status: int, content_type: str, body: bytes, more: Mapping[str, str] | None = None) -> None:
        self._head(status, content_type, {**(more or {}), "Content-Length": str(len(body))})
        self.wfile.write(body)
        self.wfile.flush()

    def _head(self, status: int, content_type: str, more: Mapping[str, str]) -> None:
        self.request_version = self.protocol_version  # also to a client that says none, or another
        self.send_response(status)
        for name, value in {"Content-Type": content_type, **_ALWAYS, **more}.items():
            self.send_header(name, value)
        self.end_headers()
