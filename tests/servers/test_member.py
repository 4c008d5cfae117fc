"""A member that serves: what is left of one that may not join, and what others hear of one that ends by itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from threaded import ThreadedJob

from kvstore import wire
from kvstore.errors import NodeLost, UsageError
from kvstore.job.config import Config
from kvstore.transport import Transport
from servers.member import ServingMember, Surroundings
from servers.requests.replies import Outbox
from servers.server import run_server


class Failing(ServingMember):
    """Serves nobody."""

    def _serve(self) -> None:
        raise ZeroDivisionError("by itself")

    def _notice(self, notice: wire.Message) -> Outbox:
        return []


def test_one_that_may_not_join_frees_its_endpoint() -> None:
    with ThreadedJob(1, 1) as job:
        with pytest.raises(UsageError, match="the job has its 1 servers already"):
            run_server(job.config("server", 1), job.network.transport, "inproc://server-1")
        again: Transport = job.network.transport()
        again.bind("inproc://server-1")  # an endpoint that is in use is refused
        again.close()


def test_the_error_that_ends_one_is_told_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(config: Config, make_transport: Callable[[], Transport], endpoint: str) -> int:
        with pytest.raises(ZeroDivisionError):
            Failing(Surroundings(config, make_transport, endpoint, time.monotonic, threading.Thread)).run()
        return 1

    monkeypatch.setattr("threaded.run_server", run)
    with ThreadedJob(1, 1) as job:
        with pytest.raises(NodeLost, match=r"server 0 failed: it ended with ZeroDivisionError\('by itself'\)"):
            job.run(lambda store: store.init("w", [1.0]))
        job.sessions[0].client.failure = None
