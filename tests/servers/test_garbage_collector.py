from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import pytest

from servers.garbage_collector import EACH, LEAST, collect_seldom, importing


@pytest.fixture
def usual() -> Iterator[int]:
    """The usual threshold, which comes back."""
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield 700
    gc.set_threshold(*before)


def test_a_large_job_has_the_collector_run_less_often(usual: int) -> None:
    collect_seldom(4096)
    assert gc.get_threshold()[0] == EACH * 4096
    assert gc.isenabled()


def test_a_small_job_has_it_run_at_least_so_seldom(usual: int) -> None:
    collect_seldom(2)
    assert usual < gc.get_threshold()[0] == LEAST


@pytest.mark.parametrize("error", [None, ImportError])
def test_what_is_imported_is_not_looked_at(error: type[Exception] | None) -> None:
    before = gc.get_freeze_count()
    with contextlib.suppress(ImportError), importing():
        assert not gc.isenabled()
        if error is not None:
            raise error
    after = gc.get_freeze_count()
    gc.unfreeze()
    assert gc.isenabled()
    assert (after > before) == (error is None)
