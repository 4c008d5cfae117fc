"""A whole job inside one process: scheduler, servers and workers as threads over an in-process network.

    with ThreadedJob(workers=2, servers=2) as cluster:
        results = cluster.run(lambda store: store.rank)            # one DistStore per worker, as 'dist_sync'
        results = cluster.run(train, mode="async")
        results = cluster.run_sessions(lambda session: ...)        # the Session itself, to make stores from

The first exception in a worker is raised by ``run``; the others then need not wait for that worker any longer.
Leaving the block ends the job and checks that every thread ended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from waiting import LONG

from kvstore.config import Config
from kvstore.consistency import Rule
from kvstore.dist import DistStore
from kvstore.errors import KVStoreError
from kvstore.member.session import Session
from kvstore.transport import InprocNetwork, Transport
from kvstore.transport.unix import UnixTransport
from servers.server import run_scheduler, run_server


class ThreadedJob:
    """See the module. ``transport`` makes a new end for links; other arguments go to ``Config``.

    With a private ``directory`` the links are unix sockets in it.
    """

    def __init__(
        self,
        workers: int = 2,
        servers: int = 2,
        *,
        network: InprocNetwork | None = None,
        timeout_s: float = LONG,
        heartbeat_s: float = 0.1,
        heartbeat_timeout_s: float = LONG,
        bigarray_bound: int = 1000,
        piece_bytes: int = 1 << 20,
        directory: Path | None = None,
    ) -> None:
        self.network = network or InprocNetwork()
        self.transport: Callable[[], Transport] = self.network.transport if directory is None else UnixTransport
        self._place = "inproc://" if directory is None else f"ipc://{directory}/"
        self._options = {
            "root": f"{self._place}scheduler",
            "num_workers": workers,
            "num_servers": servers,
            "timeout_s": timeout_s,
            "heartbeat_s": heartbeat_s,
            "heartbeat_timeout_s": heartbeat_timeout_s,
            "bigarray_bound": bigarray_bound,
            "piece_bytes": piece_bytes,
        }
        self.workers = workers
        self.servers = servers
        self.exit_codes: dict[str, int] = {}
        self._threads: list[threading.Thread] = []
        self._sessions: list[Session] = []

    def config(self, role: str, rank: int = -1) -> Config:
        """What a member of the job is configured with."""
        return Config(role=role, rank_hint=rank, **self._options)  # type: ignore[arg-type]

    def __enter__(self) -> ThreadedJob:
        self._start("scheduler", lambda: run_scheduler(self.config("scheduler"), self.transport()))
        for rank in range(self.servers):
            self._start(
                f"server {rank}",
                lambda rank=rank: run_server(
                    self.config("server", rank), self.transport, f"{self._place}server-{rank}"
                ),
            )
        threads = [
            threading.Thread(target=self._join, args=(rank,), name=f"worker {rank} joins")
            for rank in range(self.workers)
        ]
        for thread in threads:
            thread.start()
        _await(threads)
        self._sessions.sort(key=lambda session: session.rank)
        assert len(self._sessions) == self.workers, "not all workers could join"
        return self

    def __exit__(self, *exc: Any) -> None:
        for session in self._sessions:
            session.leave()
        alive = _await(self._threads)
        assert not alive, f"still running: {alive}"

    def run(
        self, work: Callable[[DistStore], Any], mode: str = "sync", rule: Rule | None = None, **options: Any
    ) -> list[Any]:
        """Call ``work`` with a new store in a thread per worker; return the results by rank."""

        def with_store(session: Session) -> Any:
            store = DistStore(session, f"dist_{mode}", rule or Rule(mode), **options)
            result = work(store)
            store.close()
            return result

        return self.run_sessions(with_store)

    def run_sessions(self, work: Callable[[Session], Any]) -> list[Any]:
        """Call ``work`` with the session in a thread per worker; return the results by rank."""
        results: list[Any] = [None] * self.workers
        errors: list[BaseException] = []

        def call(rank: int, session: Session) -> None:
            try:
                results[rank] = work(session)
            except BaseException as exc:
                errors.append(exc)
                for other in self._sessions:
                    if other is not session:
                        other.client.fail(failed)

        failed = KVStoreError("another worker of this test has failed")
        threads = [
            threading.Thread(target=call, args=(rank, session), name=f"worker {rank}")
            for rank, session in enumerate(self._sessions)
        ]
        for thread in threads:
            thread.start()
        alive = _await(threads)
        for session in self._sessions:
            if session.client.failure is failed:
                session.client.failure = None  # the job is as good as before, for other tests
        if errors:
            raise errors[0]
        assert not alive, f"hanging: {alive}"
        return results

    def _join(self, rank: int) -> None:
        self._sessions.append(Session(self.config("worker", rank), self.transport))

    def _start(self, name: str, target: Callable[[], int]) -> None:
        def run() -> None:
            self.exit_codes[name] = target()

        thread = threading.Thread(target=run, name=name)
        thread.start()
        self._threads.append(thread)


def _await(threads: list[threading.Thread]) -> list[str]:
    """Wait for threads to end; return the names of those that don't."""
    deadline = time.monotonic() + LONG + 10.0  # after their own deadlines
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [thread.name for thread in threads if thread.is_alive()]
