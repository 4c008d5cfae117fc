"""A job of two workers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from threaded import ThreadedJob


@pytest.fixture(scope="module")
def cluster() -> Iterator[ThreadedJob]:
    with ThreadedJob(workers=2, servers=2, bigarray_bound=30) as cluster:
        yield cluster
