"""Jobs of two workers, and a trainer that overlaps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from overlapping import Rig
from threaded import ThreadedJob


@pytest.fixture(scope="module")
def cluster() -> Iterator[ThreadedJob]:
    with ThreadedJob(workers=2, servers=2, bigarray_bound=30) as cluster:
        yield cluster


@pytest.fixture(params=[True, False], ids=["on the store", "in the worker"])
def rig(request: pytest.FixtureRequest) -> Rig:
    return Rig(update_on_kvstore=request.param)
