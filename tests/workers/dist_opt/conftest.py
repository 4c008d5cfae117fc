"""A job of two workers whose stores kvstore.create finds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from singa import WORKERS
from threaded import ThreadedJob

import kvstore as kv
from kvstore.client import DistStore
from kvstore.member.session import Session


@pytest.fixture(scope="module")
def cluster() -> Iterator[ThreadedJob]:
    with ThreadedJob(workers=WORKERS, servers=2, bigarray_bound=30) as cluster:
        yield cluster


@pytest.fixture
def run(cluster: ThreadedJob, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], Any]], list[Any]]:
    """Call a function with its rank on every worker, where ``kvstore.create`` makes stores of the job."""
    here = threading.local()

    def create(name: str) -> kv.KVStore:
        return DistStore(here.session, name)

    monkeypatch.setattr(kv, "create", create)

    def run(work: Callable[[int], Any]) -> list[Any]:
        def with_session(session: Session) -> Any:
            here.session = session
            return work(session.rank)

        return cluster.run_sessions(with_session)

    return run
