"""The types of stores that one suite is run against: in this process, and as jobs of threads."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from threaded import ThreadedJob

import kvstore as kv
from kvstore.client import DistStore
from kvstore.rule import Rule

Run = Callable[[Callable[[kv.KVStore], Any]], list[Any]]


@dataclass(frozen=True)
class Kind:
    """A type of store, and how many workers and servers use it together; none for a local one.

    Attributes:
        links: what their links are, as ``ThreadedJob`` knows them.
        quorum: how many workers make a round; None for all.
        finite: whether pushes of NaN are refused.
        aggregators: on how many hosts one sums what their workers push.
    """

    name: str
    workers: int = 0
    servers: int = 0
    links: str = "inproc"
    quorum: int | None = None
    finite: bool = False
    aggregators: int = 0

    @property
    def dist(self) -> bool:
        return self.workers > 0

    @property
    def rule(self) -> Rule:
        mode = "sync" if "sync" in self.name.replace("async", "") else "async"
        return Rule(mode, staleness=2 if "ssp" in self.name else None, quorum=self.quorum, finite=self.finite)

    def __str__(self) -> str:
        links = "" if self.links == "inproc" else f"-{self.links}"
        quorum = "" if self.quorum is None else "-quorum"
        hosts = f"-{self.aggregators}-hosts" if self.aggregators else ""
        return f"{self.name}-{self.workers}x{self.servers}{links}{quorum}{hosts}" if self.dist else self.name


class Jobs(contextlib.ExitStack):
    """One running job for each number of workers and servers, and kind of links."""

    def __init__(self, bound: int) -> None:
        super().__init__()
        self._bound = bound
        self._running: dict[tuple[int, int, str, int], ThreadedJob] = {}

    def job(self, kind: Kind) -> ThreadedJob:
        which = (kind.workers, kind.servers, kind.links, kind.aggregators)
        if which not in self._running:
            private = kind.links.startswith("zeromq") or kind.links in ("shm", "unix")
            directory = Path(self.enter_context(tempfile.TemporaryDirectory())) if private else None
            job = ThreadedJob(
                kind.workers,
                kind.servers,
                bigarray_bound=self._bound,
                directory=directory,
                kind=kind.links,
                aggregators=kind.aggregators,
            )
            self._running[which] = self.enter_context(job)
        return self._running[which]

    def run(self, kind: Kind, work: Callable[[kv.KVStore], Any]) -> list[Any]:
        """Call ``work`` with a new store of ``kind`` on every worker; return the results by rank."""
        if not kind.dist:
            with kv.create(kind.name, check_finite=kind.finite) as store:
                return [work(store)]

        def in_session(session: Any) -> Any:
            with DistStore(session, kind.name, kind.rule, "device" in kind.name) as store:
                return work(store)

        return self.job(kind).run_sessions(in_session)
