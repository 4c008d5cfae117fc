"""A whole job inside one process: scheduler, servers and workers as threads over an in-process network.

    with ThreadedJob(workers=2, servers=2) as cluster:
        results = cluster.run(lambda store: store.rank)            # one DistStore per worker, as 'dist_sync'
        results = cluster.run(train, mode="async")
        results = cluster.run_sessions(lambda session: ...)        # the Session itself, to make stores from

The first exception in a worker is raised by ``run``; the others then need not wait for that worker any longer.
Leaving the block ends the job and checks that every thread ended.
"""

from __future__ import annotations

import faulthandler
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jobkeys
import pytest
from inproc import InprocNetwork
from waiting import LONG

from kvstore.client import DistStore
from kvstore.errors import DeadlineExceeded, KVStoreError
from kvstore.job.config import Config
from kvstore.job.curve_keys import CurveKeys, with_key
from kvstore.member.session import Session
from kvstore.rule import Rule
from kvstore.ticket import WaitLimits
from kvstore.transport import Transport
from kvstore.transport.choose import links
from kvstore.transport.shm.shared_memory import sharing
from servers.processes import run_member
from servers.scheduler_process import run_scheduler


def set_limits(store: DistStore, seconds: float) -> None:
    """Give every later wait of ``store`` so many seconds, however patient it was made."""
    store.limits = WaitLimits(seconds, seconds)


class ThreadedJob:
    """See the module; other arguments go to ``Config``.

    Args:
        kind: what the links are: ``inproc``, over ``network``; ``unix`` and, with shared memory, ``shm``, which need a
            private ``directory`` for the sockets; ``tcp``; with keys ``curve``; or with ``KVSTORE_TRANSPORT=zeromq``
            ``zeromq``, over TCP if there is no ``directory``, and ``zeromq-shm``.
        limit_s: how long a call of ``run`` may take, in seconds, before it is said to hang.
        aggregators: on so many hosts, which share the workers evenly, there is an aggregator; ``inproc`` alone.
    """

    def __init__(
        self,
        workers: int = 2,
        servers: int = 2,
        *,
        network: InprocNetwork | None = None,
        timeout_s: float = LONG,
        patience_s: float | None = None,
        heartbeat_s: float = 1.0,
        heartbeat_timeout_s: float = LONG,
        bigarray_bound: int = 1000,
        piece_bytes: int = 1 << 20,
        directory: Path | None = None,
        kind: str = "inproc",
        limit_s: float = LONG + 10.0,  # after the members' own deadlines
        aggregators: int = 0,
        **more: Any,
    ) -> None:
        self.network = network or InprocNetwork()
        self.kind = "unix" if directory is not None and kind == "inproc" else kind
        self._place = "inproc://" if directory is None else f"ipc://{directory}/"
        root, self._root = f"{self._place}scheduler", None
        if kind in ("tcp", "curve") or (kind.startswith("zeromq") and directory is None):
            self._root = socket.create_server(("127.0.0.1", 0))
            root = f"tcp://127.0.0.1:{self._root.getsockname()[1]}"
        self._keys = jobkeys.variables(1 + servers + workers) if kind == "curve" else []
        self._options = {
            "root": with_key(root, self._keys[0]["KVSTORE_ROOT_KEY"]) if self._keys else root,
            "job": f"threaded-{os.getpid()}-{secrets.token_hex(4)}",
            "shm": kind in ("shm", "zeromq-shm"),
            "transport": "zeromq" if kind.startswith("zeromq") else "sockets",
            "num_workers": workers,
            "num_servers": servers,
            "num_aggregators": aggregators,
            "timeout_s": timeout_s,
            "patience_s": timeout_s if patience_s is None else patience_s,
            "heartbeat_s": heartbeat_s,
            "heartbeat_timeout_s": heartbeat_timeout_s,
            "bigarray_bound": bigarray_bound,
            "piece_bytes": piece_bytes,
            **more,
        }
        self.workers = workers
        self.servers = servers
        self.aggregators = aggregators
        self.limit_s = limit_s
        self.exit_codes: dict[str, int] = {}
        self._threads: list[threading.Thread] = []
        self.sessions: list[Session] = []

    def config(self, role: str, rank: int = -1) -> Config:
        options = dict(self._options)
        if self._keys:
            number = {"scheduler": 0, "server": 1 + rank, "worker": 1 + self.servers + rank}[role]
            options["keys"] = CurveKeys.from_env(self._keys[number])
        if self.aggregators and role == "worker":
            options["aggregator"] = rank * self.aggregators // self.workers
        if self._root is not None and role == "scheduler":
            options["root_fd"] = self._root.detach()
        return Config(role=role, rank_hint=rank, **options)  # type: ignore[arg-type]

    def ends(self, config: Config) -> Callable[[], Transport]:
        return self.network.transport if self.kind == "inproc" else sharing(links(config), config)

    def __enter__(self) -> ThreadedJob:
        config = self.config("scheduler")
        self._start("scheduler", lambda: run_scheduler(config, self.ends(config)()))
        for role, number in (("server", self.servers), ("aggregator", self.aggregators)):
            for rank in range(number):
                over_tcp = role == "server" and config.root.startswith("tcp")
                endpoint = "tcp://127.0.0.1:0" if over_tcp else f"{self._place}{role}-{rank}"
                its = self.config(role, rank)
                self._start(f"{role} {rank}", partial(run_member, its, self.ends(its), endpoint))
        threads = [
            threading.Thread(target=self.join, args=(rank,), name=f"worker {rank} joins")
            for rank in range(self.workers)
        ]
        for thread in threads:
            thread.start()
        _await(threads, self.limit_s)
        self.sessions.sort(key=lambda session: session.rank)
        assert len(self.sessions) == self.workers, "not all workers could join"
        return self

    def __exit__(self, *exc: Any) -> None:
        for session in self.sessions:
            session.leave()
        alive = _await(self._threads, self.limit_s)
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
        results: list[Any] = [None] * self.workers
        errors: list[BaseException] = []

        def call(rank: int, session: Session) -> None:
            try:
                results[rank] = work(session)
            except BaseException as exc:
                if isinstance(exc, DeadlineExceeded):  # nobody expected it; what does the thread do that is late?
                    faulthandler.dump_traceback(all_threads=True)
                errors.append(exc)
                for other in self.sessions:
                    if other is not session:
                        other.client.fail(failed)

        failed = KVStoreError("another worker of this test has failed")
        threads = [
            threading.Thread(target=call, args=(rank, session), name=f"worker {rank}")
            for rank, session in enumerate(self.sessions)
        ]
        for thread in threads:
            thread.start()
        alive = _await(threads, self.limit_s)
        for session in self.sessions:
            if session.client.failure is failed:
                session.client.failure = None  # the job is as good as before, for other tests
        if errors:  # one may have failed before it had made its store, and the other after that
            most = max(session.stores for session in self.sessions)
            for session in self.sessions:
                session.stores = most
        if errors:
            raise errors[0]
        assert not alive, f"hanging: {alive}"
        return results

    def join(self, rank: int) -> None:
        config = self.config("worker", rank)
        self.sessions.append(Session(config, self.ends(config)).join())

    def _start(self, name: str, target: Callable[[], int]) -> None:
        def run() -> None:
            self.exit_codes[name] = target()

        thread = threading.Thread(target=run, name=name)
        thread.start()
        self._threads.append(thread)


def shared_job(workers: int, servers: int, **options: Any) -> Any:
    """A fixture: the job that the tests of a module share."""

    @pytest.fixture(scope="module")
    def job() -> Iterator[ThreadedJob]:
        with ThreadedJob(workers, servers, **options) as job:
            yield job

    return job


def _await(threads: list[threading.Thread], limit_s: float) -> list[str]:
    deadline = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [thread.name for thread in threads if thread.is_alive()]
