"""The job whose calls are interrupted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from every_line import KINDS, LIMIT_S
from threaded import ThreadedJob


@pytest.fixture(scope="module", params=KINDS)
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreadedJob]:
    directory = None
    if request.param in ("unix", "shm"):
        directory = tmp_path_factory.mktemp("links")
        directory.chmod(0o700)
    with ThreadedJob(
        1, 2, directory=directory, kind=request.param, bigarray_bound=1000, timeout_s=20.0, limit_s=LIMIT_S
    ) as job:
        yield job
