"""A store of each type, on every worker of a job that runs for all tests of a module."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from every_store import BOUND, Kind, Run
from threaded import ThreadedJob

import kvstore as kv
from kvstore.client import DistStore
from kvstore.rule import Rule


@pytest.fixture(scope="module")
def clusters() -> Iterator[Callable[[Kind], ThreadedJob]]:
    """One running job for each kind of dist store, for all tests of this module."""
    running: dict[Kind, ThreadedJob] = {}
    with contextlib.ExitStack() as stack:

        def cluster_for(kind: Kind) -> ThreadedJob:
            if kind not in running:
                ipc = kind.links.startswith("zeromq")
                directory = Path(stack.enter_context(tempfile.TemporaryDirectory())) if ipc else None
                cluster = ThreadedJob(
                    kind.workers, kind.servers, bigarray_bound=BOUND, directory=directory, kind=kind.links
                )
                running[kind] = stack.enter_context(cluster)
            return running[kind]

        yield cluster_for


@pytest.fixture
def run(request: pytest.FixtureRequest, clusters: Callable[[Kind], ThreadedJob]) -> Run:
    """Calls a function with a new store on every worker, and returns the results by rank."""
    kind: Kind = request.param

    def run_local(work: Callable[[kv.KVStore], Any]) -> list[Any]:
        with kv.create(kind.name) as store:
            return [work(store)]

    def run_dist(work: Callable[[kv.KVStore], Any]) -> list[Any]:
        def in_session(session: Any) -> Any:
            mode = "async" if "async" in kind.name else "sync"
            with DistStore(session, kind.name, Rule(mode), "device" in kind.name) as store:
                return work(store)

        return clusters(kind).run_sessions(in_session)

    return run_dist if kind.dist else run_local
