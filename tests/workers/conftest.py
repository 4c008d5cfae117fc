"""Running jobs for all tests of a file, and buckets that small networks have several of."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from layers import BUCKET_BYTES
from threaded import ThreadedJob

from workers.common import buckets


@pytest.fixture(scope="module", params=[1, 2, 3])
def cluster(request: pytest.FixtureRequest) -> Iterator[ThreadedJob]:
    with ThreadedJob(workers=request.param, servers=2, bigarray_bound=30) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def pair() -> Iterator[ThreadedJob]:
    with ThreadedJob(workers=2, servers=2, bigarray_bound=30) as cluster:
        yield cluster


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each layer; see ``layers``."""
    monkeypatch.setattr(buckets, "FIRST_BYTES", BUCKET_BYTES)
    monkeypatch.setattr(buckets, "BUCKET_BYTES", BUCKET_BYTES)
