"""Jobs inside this process: of a worker, and of two and three, whose small arrays are cut over as many servers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from small_jobs import BOUND
from threaded import ThreadedJob


@pytest.fixture(scope="module")
def cluster() -> Iterator[ThreadedJob]:
    with ThreadedJob(workers=2, servers=2, bigarray_bound=BOUND) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def three() -> Iterator[ThreadedJob]:
    with ThreadedJob(workers=3, servers=3, bigarray_bound=BOUND) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def alone() -> Iterator[ThreadedJob]:
    with ThreadedJob(workers=1, servers=1) as cluster:
        yield cluster
