"""What workers call about the job: they wait for each other, run out of data, and report."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from small_jobs import SOON
from threaded import ThreadedJob, set_limits
from waiting import LONG

import kvstore as kv
from kvstore.client import DistStore
from kvstore.member.session import Session


@pytest.fixture(scope="module")
def cluster() -> Iterator[ThreadedJob]:
    with ThreadedJob(2, 2) as job:
        yield job


def test_a_barrier_that_was_late_is_the_same_barrier_when_called_again(cluster: ThreadedJob) -> None:
    late = threading.Event()

    def zero(store: DistStore) -> None:
        set_limits(store, SOON)
        with pytest.raises(kv.DeadlineExceeded, match="waits at the barrier for worker 1"):
            store.barrier()
        late.set()
        set_limits(store, LONG)
        store.barrier()

    def one(store: DistStore) -> None:
        assert late.wait(LONG)
        store.barrier()

    def work(store: DistStore) -> None:
        (one if store.rank else zero)(store)
        store.barrier()

    cluster.run(work)


def test_the_worker_that_has_pushed_most_joins_last_and_rounds_go_on_without_the_other(cluster: ThreadedJob) -> None:
    def work(store: DistStore) -> None:
        store.init("w", torch.zeros(1))
        out = torch.zeros(1)
        for _ in range(1 + store.rank):
            store.pushpull("w", torch.ones(1), out)
        store.begin_join()
        assert store.join() == 1
        store.pull("w", out)
        assert out.item() == 1, "the second round is worker 1's alone"
        assert store.num_dead_nodes() == 0

    cluster.run(work)


def test_what_is_reported_goes_with_the_next_beat_and_nothing_is_traced_without_a_trace(cluster: ThreadedJob) -> None:
    def work(session: Session) -> None:
        store = DistStore(session)
        store.report({"loss": 0.5}, input_s=0.25)
        report = session.activity.report()
        assert (report.values, report.input_us) == ([["loss", 0.5]], 250_000)
        with store.traced("forward"):
            store.barrier()
        assert store.barriers == 1
        store.close()

    cluster.run_sessions(work)
