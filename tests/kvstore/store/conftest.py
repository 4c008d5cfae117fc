"""The stores that the suites here run on, and a registry of the test's own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from small_jobs import BOUND
from store_kinds import Jobs, Run

import kvstore as kv
from kvstore.store import registry as names_of_stores


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, type[kv.KVStore]]:
    """What is registered in a test is forgotten after it."""
    monkeypatch.setattr(names_of_stores, "REGISTERED", {})
    return names_of_stores.REGISTERED


@pytest.fixture(scope="module")
def jobs() -> Iterator[Jobs]:
    """One running job for each kind of dist store, for all tests of a module."""
    with Jobs(BOUND) as jobs:
        yield jobs


@pytest.fixture
def run(request: pytest.FixtureRequest, jobs: Jobs) -> Run:
    """Calls a function with a new store on every worker, and returns the results by rank."""
    return lambda work: jobs.run(request.param, work)
