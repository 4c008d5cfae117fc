"""What tests with jobs in threads rely on: the error that came first is the one they show."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from threaded import ThreadedJob
from waiting import LONG

from kvstore.client import DistStore


def test_the_first_failure_is_raised_and_the_others_do_not_wait_for_it() -> None:
    waits = threading.Event()

    def work(store: DistStore) -> float:
        store.init("w", torch.zeros(1))
        out = torch.zeros(1)
        if store.rank == 0:
            waits.set()
        else:
            assert waits.wait(LONG)
            if broken:
                raise ZeroDivisionError
        store.pushpull("w", torch.ones(1), out)
        return out.item()

    with ThreadedJob(2, 1, timeout_s=10 * LONG) as job:
        began, broken = time.monotonic(), True
        with pytest.raises(ZeroDivisionError):
            job.run(work)
        assert time.monotonic() - began < LONG
        broken = False
        assert job.run(work) == [2, 2], "the job can still be used"
