"""A job of two workers, and buckets that small networks have several of."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from threaded import ThreadedJob


@pytest.fixture(scope="module")
def cluster() -> Iterator[ThreadedJob]:
    with ThreadedJob(workers=2, servers=2, bigarray_bound=30) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.common.buckets.FIRST_BYTES", 64)
    monkeypatch.setattr("workers.common.buckets.BUCKET_BYTES", 200)
