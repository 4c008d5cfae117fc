"""The page in a real browser: of a real job, and of a simulated one of 64 workers and 16 servers."""

from __future__ import annotations

import contextlib
import functools
import http.server
import os
import re
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jobs import Job, job
from simulated_job import SimulatedJob, SimulatedSession
from trace_reader import ReadTrace
from waiting import LONG, until

from servers.observer import web
from servers.observer.metrics import JobDescription
from servers.observer.observer_process import PageServing, serve

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")


@dataclass
class Tab:
    """A page that is open, and what it has asked for and complained about.

    Attributes:
        page: playwright's.
        requests: the addresses that it has asked for.
        complaints: errors and warnings of its console, and exceptions that nothing caught.
        statuses: the status of each answer, by its address.
    """

    page: Any
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    statuses: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        def on_console(message: Any) -> None:
            if message.type in ("error", "warning"):
                self.complaints.append(message.text)

        self.page.on("console", on_console)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("response", lambda answer: self.statuses.update({answer.url: answer.status}))


class Browser:
    """Opens tabs, each as a new user."""

    def __init__(self, chromium: Any) -> None:
        self._chromium = chromium

    def tab(self, *, width: int = 1280, height: int = 900, **options: Any) -> Tab:
        """A new tab, of a window of this size; ``options`` are those of playwright's ``new_context``."""
        context = self._chromium.new_context(viewport={"width": width, "height": height}, **options)
        return Tab(context.new_page())


@contextlib.contextmanager
def browser(*words: str) -> Iterator[Browser]:
    """Have a browser, started with these words, while the block runs."""
    program = next((path for name in PROGRAMS if (path := shutil.which(name))), None)
    if program is None:
        pytest.skip("not installed: chromium (.ci/run installs it)")
    playwright = pytest.importorskip("playwright.sync_api", reason="not installed: playwright (extra test)")
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # root has none
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=program, args=[*sandbox, "--disable-dev-shm-usage", *words])
        try:
            yield Browser(chromium)
        finally:
            chromium.close()


MILLI = 1000
TOKEN = "t" * 43

# Worker 1 is late in every round.
STRAGGLES = """
    import time
    import numpy as np
    import kvstore as kv

    store = kv.create("dist_sync")
    store.init("w", np.zeros(1000))
    while True:
        if store.rank == 1:
            time.sleep(0.05)
        store.pushpull("w", np.ones(1000))
        store.report({"loss": 0.25})
"""


def address(running: Job) -> str:
    running.until(lambda: re.search(r"http://\S+\n", running.output), "the address")
    found = re.search(r"http://\S+", running.output)
    assert found is not None
    return found[0]


def see(tab: Tab, where: str, text: str) -> None:
    """Wait until an element has this text; say what the page has come to if it does not."""
    try:
        tab.page.locator(where, has_text=text).first.wait_for(timeout=LONG * MILLI)
    except Exception as error:
        shown = tab.page.inner_text("body")[:1000]
        raise AssertionError(f"no {text!r} in {where}: {tab.statuses}, {tab.complaints}, {shown!r}") from error


@pytest.mark.long
def test_the_page_of_a_job_names_a_straggler_and_shows_a_killed_worker_and_so_does_its_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    words = ["--dashboard", "--trace", f"{path}:2-9999"]
    options = {"workers": 2, "servers": 1, "options": words, "KVSTORE_HEARTBEAT_S": "1"}
    with browser() as opened, job(tmp_path, STRAGGLES, **options) as running:  # type: ignore[arg-type]
        tab = opened.tab()
        tab.page.goto(address(running))
        assert "token" not in tab.page.url
        see(tab, "#workers tr", "worker 0ready")
        see(tab, "#servers tr", "server 0ready")
        see(tab, "#charts .value", "loss0.25")
        see(tab, "#advice li", "worker 1")
        until(lambda: tab.page.locator("#workers .hot").count() >= 1, "worker 1 is marked")
        see(tab, "#state", "running")

        observers = running.members("observer")
        (worker,) = running.members("worker", 0)
        os.kill(worker, signal.SIGKILL)
        see(tab, "#workers tr[data-state=lost]", "worker 0")
        see(tab, "#banner", "worker 0 was killed by SIGKILL")
        see(tab, "#events li", "worker 0")
        assert running.wait() == 128 + signal.SIGKILL
        assert not any(Path(f"/proc/{pid}").exists() for pid in observers)
        see(tab, "#workers tr[data-state=lost]", "worker 0")  # the page stays as it was in the end
        assert tab.complaints == []
        own = re.match(r"http://127\.0\.0\.1:\d+/", tab.page.url)
        assert own is not None
        assert [url for url in tab.requests if not url.startswith(own[0])] == []
    trace = ReadTrace.of(path)
    assert set(trace.names.values()) == {"scheduler", "worker 0", "worker 1", "server 0"}
    assert trace.about["rounds"] == "2-9999"
    assert trace.about["records lost"] == {}
    assert {span["args"]["round"] for span in trace.spans("worker 0", "pushpull")} >= set(range(2, 22))
    assert len(trace.spans("server 0", "update")) >= 20
    assert trace.round_trips() >= 40
    assert [begin["args"]["round"] for begin, _ in trace.requests("worker 1") if "answered" in begin["args"]]
    assert any("worker 0" in event["name"] for event in trace.events if event["ph"] == "i")


@pytest.mark.release
def test_the_job_goes_on_without_the_page_and_has_the_same_bits(tmp_path: Path) -> None:
    script = """
        import pathlib, time
        import numpy as np
        import kvstore as kv

        here = pathlib.Path(__file__).parent
        store = kv.create("dist_sync")
        rng = np.random.default_rng(store.rank)
        store.init("w", np.zeros(1000, np.float32))
        value = np.zeros(1000, np.float32)
        for step in range(20):
            store.pushpull("w", rng.normal(size=1000).astype(np.float32), out=value)
            if step == 10:
                (here / f"half-{store.rank}").touch()
                while not (here / "go").exists():
                    time.sleep(0.01)
        (here / f"{store.rank}.bits").write_bytes(value.tobytes())
    """
    with job(tmp_path, script, workers=1, servers=1, options=["--dashboard"]) as running:
        running.until((tmp_path / "half-0").exists, "half of the job")
        (observer,) = running.members("observer")
        os.kill(observer, signal.SIGKILL)
        running.until(running.said("is gone"), "the line that says so")
        (tmp_path / "go").touch()
        assert running.wait() == 0, running.output
    line = "the dashboard is gone: it was killed by SIGKILL; the job goes on without it"
    assert running.output.count(line) == 1
    expected = np.random.default_rng(0).normal(size=(20, 1000)).astype(np.float32)[-1]
    assert (tmp_path / "0.bits").read_bytes() == expected.tobytes()


@contextlib.contextmanager
def simulated() -> Iterator[int]:
    listener = socket.create_server(("127.0.0.1", 0))
    over, began, simulated_job = threading.Event(), time.monotonic(), SimulatedJob(straggler=7, killed=9)
    page = PageServing(listener, TOKEN, JobDescription("job", "train.py <b>&amp;"), over)

    def age() -> float:
        return 60.0 + time.monotonic() - began

    thread = threading.Thread(target=serve, args=(page, lambda: SimulatedSession(simulated_job, age)), daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        over.set()
        thread.join(LONG)


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files, and prints nothing."""

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def elsewhere(folder: Path) -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder)) as site:
        thread = threading.Thread(target=site.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{site.server_port}"
        finally:
            site.shutdown()
            thread.join(LONG)


@pytest.mark.release
def test_the_page_of_a_large_job_is_for_its_owner_at_any_width_and_without_a_mouse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with browser("--host-resolver-rules=MAP evil.example 127.0.0.1") as opened, simulated() as port:
        ours = f"http://127.0.0.1:{port}/"
        stranger = opened.tab().page
        assert stranger.goto(ours).status == 403
        assert stranger.goto(f"{ours}?token={'x' * 43}").status == 403
        assert stranger.goto(f"http://evil.example:{port}/?token={TOKEN}").status == 421
        tab = opened.tab()
        assert tab.page.goto(f"{ours}?token={TOKEN}").status == 200
        own = tab.page.url
        assert re.fullmatch(re.escape(ours) + "[A-Za-z0-9_-]{22}/", own)
        see(tab, "#workers tr[data-state=lost]", "worker 9")
        assert tab.page.locator("#workers tbody tr").count() == 64
        assert tab.page.locator("#servers tbody tr").count() == 16
        see(tab, "#advice li", "worker 7")
        assert tab.page.locator("h1").inner_text() == "train.py <b>&amp;"
        by_keys(tab)
        assert tab.complaints == []

        (tmp_path / "index.html").write_text(
            f'<img src="{own}icon.svg"><script src="{own}page.js"></script><iframe src="{own}"></iframe>'
            f'<script>fetch("{own}history", {{credentials: "include"}})'
            '.catch(() => document.title = "kept out")</script>'
        )
        tab.statuses.clear()
        with elsewhere(tmp_path) as other:  # with the cookie: for browsers it is of the same site
            shown = tab.page.goto(other)
            assert shown is not None
            assert "cookie" not in shown.request.all_headers(), "browsers send cookies to all ports of their host"
            until(lambda: tab.page.title() == "kept out", "the refusal")
            tab.page.wait_for_load_state()
        assert {status for url, status in tab.statuses.items() if url.startswith(ours)} == {403}

        for width, scheme in ((400, "dark"), (1280, "light")):
            tab = opened.tab(width=width, color_scheme=scheme, reduced_motion="reduce")
            tab.page.goto(f"{ours}?token={TOKEN}")
            see(tab, "#workers tr", "worker 63")
            assert tab.page.evaluate("document.documentElement.scrollWidth") == width
            assert tab.page.evaluate("document.getAnimations().length") == 0
            assert tab.complaints == []

        with monkeypatch.context() as full:  # one page too many asks again until there is room
            full.setattr(web, "MOST_STREAMS", 0)
            tab = opened.tab()
            with tab.page.expect_response(lambda answer: answer.status == 503, timeout=LONG * MILLI):
                tab.page.goto(f"{ours}?token={TOKEN}")
        see(tab, "#workers tr", "worker 63")


def by_keys(tab: Tab) -> None:
    """Do with the keyboard what can be done."""
    keys = tab.page.keyboard
    keys.press("Tab")
    assert tab.page.evaluate("document.activeElement.className") == "skip"
    keys.press("Enter")
    assert tab.page.evaluate("document.activeElement.id") == "main"

    tab.page.get_by_role("button", name="Comes last").focus()
    keys.press("Enter")
    head = tab.page.locator("#workers th[aria-sort]")
    assert (head.inner_text(), head.get_attribute("aria-sort")) == ("Comes last", "descending")
    assert tab.page.locator("#workers tbody th").first.inner_text() == "worker 7"
    keys.press("Enter")
    assert head.get_attribute("aria-sort") == "ascending"

    tab.page.locator("#workers tbody th button").first.focus()
    keys.press("Enter")
    until(lambda: tab.page.locator("#member .value").count() == 4, "the member's charts")
    keys.press("Escape")
    assert not tab.page.locator("#member").is_visible()

    tab.page.locator("#span input").first.focus()
    keys.press("ArrowRight")
    assert tab.page.locator("#span input:checked").get_attribute("value") == "hours"
    tab.page.locator("#links").focus()
    keys.press("ArrowDown")
    keys.press("ArrowRight")
    see(tab, "#links-cell", "worker 0 and server 1: ")
