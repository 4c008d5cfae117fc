"""A few integers of every worker, for all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from threaded import ThreadedJob

import kvstore as kv
from kvstore.client import DistStore
from workers.common.gather import Gather, digest, require_sums


def test_every_worker_gets_the_rows_of_all_by_rank(cluster: ThreadedJob) -> None:
    def work(store: DistStore) -> Any:
        gather = Gather(store, "/test", 3)
        return [gather.exchange([store.rank + 1, 2**62 + turn]) for turn in range(2)]

    workers = range(cluster.workers)
    rows = [[[rank + 1, 2**62 + turn, 0] for rank in workers] for turn in range(2)]
    assert cluster.run(work) == [rows for _ in workers]


def test_a_mean_is_the_same_to_the_bit_on_all(pair: ThreadedJob) -> None:
    def work(store: DistStore) -> float:
        return Gather(store, "/test", 2).mean([0.1, 0.2][store.rank])

    assert pair.run(work) == [(0.1 + 0.2) / 2] * 2


@given(st.floats(allow_nan=False))
def test_alone_a_mean_is_the_number(number: float) -> None:
    assert Gather(kv.create("local"), "/test", 2).mean(number) == number


def test_a_table_is_shared_or_says_that_the_store_is_in_use() -> None:
    store = kv.create("local")
    Gather(store, "/test")
    Gather(store, "/test")
    with pytest.raises(kv.UsageError, match=r"make a second one with kvstore\.create"):
        Gather(store, "/test", shared=False)


@pytest.mark.parametrize("before", [True, False])
def test_a_store_that_does_not_sum_is_refused(before: bool) -> None:
    def update(key: Any, pushed: torch.Tensor, stored: torch.Tensor) -> None:
        stored.add_(pushed)

    store = kv.create("local")
    if before:
        store.set_updater(update)
    gather = Gather(store, "/test")
    if not before:
        store.set_updater(update)
    with pytest.raises(kv.UsageError, match="does not sum what is pushed"):
        gather.exchange([1])


@pytest.mark.parametrize("kind", ["dist_async", "dist_ssp"])
def test_stores_where_every_push_is_an_update_cannot_sum(kind: str) -> None:
    with pytest.raises(kv.UsageError, match=f"'{kind}' store updates for every push"):
        require_sums(kind)
    require_sums("dist_sync")
    require_sums("device")


def test_a_digest_is_small_enough_to_be_added_and_differs() -> None:
    texts = [f"parameter {number}" for number in range(1000)]
    assert len({digest(text) for text in texts}) == 1000
    assert all(0 <= digest(text) < 2**52 for text in texts)
    assert digest("a") == digest("a")
