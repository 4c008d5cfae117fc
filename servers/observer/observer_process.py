"""The observer as a process: it looks at the job, and serves the page, until the job is over."""

from __future__ import annotations

import math
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from urllib.parse import parse_qsl

from kvstore.errors import ConfigError, NodeLost
from kvstore.job import page_address
from kvstore.job.place import ObservingPlace
from kvstore.job.settings import DASHBOARD_FD, DASHBOARD_TOKEN, LIFELINE, OBSERVE
from kvstore.observing.choice import jobs_here, listed, place_named, roots_here
from kvstore.observing.observer_session import ObserverSession
from servers.observer import metrics
from servers.observer.access import Access
from servers.observer.metrics import JobDescription
from servers.observer.trace_recording import TraceRecording
from servers.observer.watcher import Feed, JobWatcher
from servers.observer.web import Answer, Web, page_files

LOOK_S = 1.0
FIRST_S = 0.1  # until there is something to see
WATCHED_S = 0.5  # between two looks while the page is open
REST_S = 0.05  # between two looks, however much happens
MISSING_S = 15.0  # without an answer, the job is taken to be over, where nobody says when it is
PARTING_S = 0.2  # how long the last look may take
LOST_S = 3.0  # the scheduler answers within this time, or the page says that it does not
_BOARD = Path(__file__).with_name("grafana")
_TYPES = {".json": "application/json", ".yml": "text/plain; charset=utf-8"}

Connect = Callable[[], ObserverSession]


@dataclass(frozen=True)
class PageServing:
    """The page of a job: its listening socket, its token, and what is set when the job is over, if anything is."""

    listener: socket.socket
    token: str = field(repr=False)
    about: JobDescription = field(default_factory=JobDescription)
    over: threading.Event | None = None

    @classmethod
    def from_env(cls, env: Mapping[str, str], about: JobDescription, over: threading.Event | None) -> PageServing:
        """Return the page that the starter of this process has prepared, or a page of its own.

        Raises:
            ConfigError: the port is not free, or the token cannot be read.
        """
        if (fd := DASHBOARD_FD.read(env)) >= 0:
            return cls(socket.socket(fileno=fd), DASHBOARD_TOKEN.read(env), about, over)
        listener, token = page_address.prepared(env)
        for line in page_address.lines(listener.getsockname()[1], token, env):
            print(line, file=sys.stderr, flush=True)
        return cls(listener, token, about, over)


def run_observer(env: Mapping[str, str]) -> int:
    """Show the job of ``KVSTORE_OBSERVE``, or write its trace, until it is over; return 0, or 130 after Ctrl-C."""
    try:
        over = _lifeline() if LIFELINE.read(env) else None
        if over is None:  # no launch.py ends this process
            # It has Python's handler, or is ignored, as in a script with `kvstore-status ... &`: that must stay so.
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        _observe(env, over)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


def _observe(env: Mapping[str, str], over: threading.Event | None) -> None:
    place = _place(env)

    def connect() -> ObserverSession:
        return ObserverSession.of(place, LOST_S, env)

    recording = TraceRecording.from_env(env, connect, over)
    if recording is not None and DASHBOARD_FD.read(env) < 0:
        recording.run()
        return
    page = PageServing.from_env(env, JobDescription(place.job, place.command), over)
    with recording or nullcontext():
        serve(page, connect)


def _place(env: Mapping[str, str]) -> ObservingPlace:
    wanted = OBSERVE.read(env)
    places = [] if os.sep in wanted else jobs_here(roots_here())[0]
    if wanted:
        return place_named(wanted, places)
    if len(places) != 1:
        raise ConfigError(
            f"which job? Set {OBSERVE.name} to the number of its launch.py; running here: {listed(places)}"
        )
    return places[0]


def serve(page: PageServing, connect: Connect, missing_s: float = MISSING_S) -> None:
    """Serve the page until the job is over. NodeLost: the scheduler has never answered, so nobody can say."""
    feed = Feed()
    watcher = JobWatcher(connect, feed, page.about.command)
    session, folder = secrets.token_urlsafe(32), f"/{secrets.token_urlsafe(16)}/"
    access = Access(page.token, session, page.listener.getsockname()[1], folder)
    web = Web(page.listener, access, page_files(), feed, _answers(watcher, page.about))
    web.start()
    looks = Looks(watcher, lambda: web.streams > 0, page.over, missing_s)
    looks.start()
    try:
        looks.over.wait()
    finally:
        watcher.end("The job is over.")
        web.close()
        if looks.end(PARTING_S):
            watcher.close()
    if looks.failure is not None:
        raise looks.failure


class Looks(threading.Thread):
    """Looks at the job again and again. In a thread of its own: a look may take seconds when the job ends.

    Args:
        watcher: what looks.
        watched: whether the page is open.
        over: set when the job is over; None if nobody says so: then a scheduler that is silent for ``missing_s`` means
            that it is.
        missing_s: see ``MISSING_S``.
    """

    def __init__(
        self, watcher: JobWatcher, watched: Callable[[], bool], over: threading.Event | None, missing_s: float
    ) -> None:
        super().__init__(name="looks", daemon=True)
        self._watcher = watcher
        self._watched = watched
        self._patience_s = missing_s if over is None else math.inf
        self.over = over or threading.Event()
        self.failure: Exception | None = None

    def run(self) -> None:
        try:
            self._look_on()
        except Exception as error:
            self.failure = error
        self.over.set()

    def _look_on(self) -> None:
        began, watcher = time.monotonic(), self._watcher
        while True:
            watcher.look(time.monotonic())
            if time.monotonic() - max(began, watcher.answered) > self._patience_s:
                if watcher.view is None:
                    raise NodeLost(f"the scheduler has not answered within {self._patience_s:g} s")
                return
            pause = FIRST_S if watcher.view is None else WATCHED_S if self._watched() else LOOK_S
            if self._rest(pause):
                return

    def _rest(self, seconds: float) -> bool:
        """Wait until it is time for the next look; return whether the job is over."""
        # News may come in bursts, and each would end the wait on the link at once: looks take time that the job needs.
        if self.over.wait(REST_S):
            return True
        if self._watcher.wait(max(0.0, seconds - REST_S)):
            return self.over.is_set()
        return self.over.wait(max(0.0, seconds - REST_S))

    def end(self, patience_s: float) -> bool:
        """Look no more; return whether the thread has ended within so many seconds."""
        self.over.set()
        self._watcher.wake()
        self.join(patience_s)
        return not self.is_alive()


def _answers(watcher: JobWatcher, about: JobDescription) -> dict[str, Answer]:

    def history(query: str) -> tuple[str, bytes]:
        asked = dict(parse_qsl(query, max_num_fields=4))
        return "application/json", watcher.history(asked.get("span", "recent"), asked.get("member", ""))

    def exposition(_query: str) -> tuple[str, bytes]:
        text = metrics.exposition(watcher.view, time.monotonic() - watcher.answered, about)
        return metrics.CONTENT_TYPE, text

    found: dict[str, Answer] = {"/history": history, "/metrics": exposition}
    for path in sorted(_BOARD.glob("*.*")):
        found[f"/grafana/{path.name}"] = partial(_file, path)
    return found


def _file(path: Path, _query: str) -> tuple[str, bytes]:
    return _TYPES.get(path.suffix, "text/plain; charset=utf-8"), path.read_bytes()


def _lifeline() -> threading.Event:
    """Return what is set when the standard input ends: the job is over, or launch.py dead."""
    over = threading.Event()

    def wait() -> None:
        with suppress(OSError):
            while os.read(0, 1024):
                pass
        over.set()

    threading.Thread(target=wait, name="lifeline", daemon=True).start()
    return over
