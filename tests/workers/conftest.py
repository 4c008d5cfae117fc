"""Running jobs for all tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from threaded import ThreadedJob


@pytest.fixture(scope="module", params=[1, 2, 3])
def cluster(request: pytest.FixtureRequest) -> Iterator[ThreadedJob]:
    with ThreadedJob(workers=request.param, servers=2, bigarray_bound=30) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def pair() -> Iterator[ThreadedJob]:
    with ThreadedJob(workers=2, servers=2, bigarray_bound=30) as cluster:
        yield cluster
