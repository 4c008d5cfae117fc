"""Keys and their first values on every store, what is refused at the call, and the job that a store tells of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from every_store import every, pulled, settle
from small_jobs import BOUND
from store_kinds import Run

import kvstore as kv


@every
def test_everybody_gets_rank_zeros_values(store: kv.KVStore) -> None:
    keys = ["a", "b", "c"]
    outs = [torch.empty(3), torch.empty(BOUND), torch.empty(())]
    store.broadcast(keys, [torch.full(out.shape, 5.0 + store.rank) for out in outs], outs)
    assert all((out == 5).all() for out in outs)
    store.broadcast("d", torch.full((2,), float(store.rank)), [both := torch.empty(2), torch.empty(2)])
    assert (both == 0).all()


@every
def test_a_second_init_raises_and_changes_nothing(store: kv.KVStore) -> None:
    store.init("a", torch.ones(2))
    with pytest.raises(kv.AlreadyInitialized, match="'a'"):
        store.init("a", torch.zeros(2))
    with pytest.raises(kv.AlreadyInitialized, match="'a'"):
        store.init(["b", "a"], [torch.zeros(2)] * 2)
    store.init("b", torch.full((2,), 3.0))
    assert pulled(store, "a", (2,)).tolist() == [1, 1]
    assert pulled(store, "b", (2,)).tolist() == [3, 3]


@every
def test_init_of_one_key_twice_in_a_call(store: kv.KVStore) -> None:
    with pytest.raises(kv.UsageError, match="twice"):
        store.init(["a", "a"], [torch.ones(2)] * 2)
    store.init("a", torch.ones(2))


@every
def test_a_key_without_a_value(store: kv.KVStore) -> None:
    store.init("a", torch.ones(2))
    for call in (
        lambda: store.push("b", torch.ones(2)),
        lambda: store.pull("b", torch.ones(2)),
        lambda: store.pushpull("b", torch.ones(2)),
        lambda: store.pull(["a", "b"], [torch.ones(2)] * 2),
    ):
        with pytest.raises(kv.KeyNotInitialized, match=r"'b'.*init"):
            call()


@every
def test_a_key_that_is_misspelled(store: kv.KVStore) -> None:
    store.init(["weight", "bias"], [torch.ones(2), torch.ones(2)])
    for call in (
        lambda: store.push("wieght", torch.ones(2)),
        lambda: store.pull("wieght", torch.ones(2)),
        lambda: store.pushpull("wieght", torch.ones(2)),
        lambda: store.push(["bias", "wieght"], [torch.ones(2)] * 2),
        lambda: store.pull(["bias", "wieght"], [torch.ones(2)] * 2),
        lambda: store.pushpull(["bias", "wieght"], [torch.ones(2)] * 2),
    ):
        with pytest.raises(kv.KeyNotInitialized, match=r"'wieght' has no value.*; did you mean 'weight'\?"):
            call()


@pytest.mark.parametrize(
    "wrong", [torch.ones(3), torch.ones(2, 1), torch.ones(2, dtype=torch.float64), np.ones(2, "i4")]
)
@every
def test_another_shape_or_dtype_raises_at_the_call(store: kv.KVStore, wrong: Any) -> None:
    store.set_optimizer("sgd", learning_rate=1.0)
    store.init("w", torch.ones(2))
    right = torch.ones(2)
    for call in (
        lambda: store.push("w", wrong),
        lambda: store.pull("w", wrong),
        lambda: store.pull("w", [right, wrong]),
        lambda: store.pushpull("w", wrong, right),
        lambda: store.pushpull("w", right, wrong),
    ):
        with pytest.raises(kv.Mismatch, match=r"'w' is float32\[2\]"):
            call()
    with pytest.raises(kv.UsageError, match="differ"):
        store.push("w", [right, wrong])
    settle(store, store.push("w", right))
    assert pulled(store, "w", (2,)).tolist() == [1 - store.num_workers] * 2


@every
def test_keys_of_one_kind(store: kv.KVStore) -> None:
    with pytest.raises(kv.KeyNotInitialized):
        store.pull("w", torch.ones(1))
    with pytest.raises(kv.UsageError, match="keys of one kind"):
        store.init(["w", 3], [torch.ones(1)] * 2)
    store.init(3, torch.ones(1))
    for call in (
        lambda: store.init("w", torch.ones(1)),
        lambda: store.push("3", torch.ones(1)),
        lambda: store.pull([3, "3"], [torch.ones(1)] * 2),
    ):
        with pytest.raises(kv.UsageError, match="keys of one kind"):
            call()
    assert pulled(store, 3, (1,)).tolist() == [1]


@pytest.mark.parametrize(
    "bad", [3.0, "value", object(), np.zeros(2, complex), torch.eye(2).to_sparse(), [torch.ones(2), None]]
)
@every
def test_what_is_no_value(store: kv.KVStore, bad: Any) -> None:
    store.init("w", torch.ones(2))
    for call in (
        lambda: store.init("v", bad),
        lambda: store.push("w", bad),
        lambda: store.pull("w", bad),
        lambda: store.pushpull("w", bad, torch.ones(2)),
        lambda: store.pushpull("w", torch.ones(2), bad),
    ):
        with pytest.raises(kv.UsageError):
            call()
    assert pulled(store, "w", (2,)).tolist() == [1, 1]


@every
def test_outs_that_cannot_be_written(store: kv.KVStore) -> None:
    store.set_optimizer("sgd")
    store.init("w", np.ones(2))
    fixed = np.ones(2)
    fixed.flags.writeable = False
    for call in (
        lambda: store.pull("w", fixed),
        lambda: store.pull("w", np.ones(2)[::-1]),
        lambda: store.pushpull("w", fixed),
        lambda: store.pull("w", torch.ones(1, dtype=torch.float64).expand(2)),
    ):
        with pytest.raises(kv.UsageError, match=r"out (has|is)"):
            call()


@every
def test_mxnets_calls_for_sparse_values_and_commands(run: Run) -> None:
    def work(store: kv.KVStore) -> list[float]:
        store.init("w", torch.ones(3))
        out = torch.zeros(3)
        store.pull("w", out, 0, ignore_sparse=False)
        with pytest.raises(kv.UsageError):  # it is for tables
            store.row_sparse_pull("w", out=out, row_ids=torch.tensor([0]))
        with pytest.raises(kv.Unsupported, match="no commands; call set_optimizer"):
            store._send_command_to_servers(0, "")
        return out.tolist()

    assert all(result == [1, 1, 1] for result in run(work))


@every
def test_the_job(run: Run) -> None:
    def work(store: kv.KVStore) -> tuple[int, int]:
        assert store.num_dead_nodes() == 0
        assert store.is_capable("optimizer")
        assert store.is_capable("Optimizer")
        with pytest.raises(kv.UnknownName, match="choose from optimizer"):
            store.is_capable("flight")
        store.barrier()
        store._barrier()
        return store.rank, store.num_workers

    results = run(work)
    assert results == [(rank, len(results)) for rank in range(len(results))]


@every
def test_statistics(run: Run) -> None:
    def work(store: kv.KVStore) -> kv.Statistics:
        store.set_optimizer("sgd")
        assert store.statistics().keys == 0
        store.init(["a", "b"], [torch.zeros(4), torch.zeros(BOUND)])
        for _ in range(3):
            store.push(["a", "b"], [torch.zeros(4), torch.zeros(BOUND)]).wait()
        store.pull("a", torch.zeros(4))
        store.pushpull("a", torch.zeros(4))
        store.push("a", torch.zeros(4)).wait()
        return store.statistics()

    for statistics in run(work):
        assert (statistics.keys, statistics.pushes, statistics.pulls, statistics.outstanding) == (2, 8, 2, 0)
        if statistics.server_bytes:
            assert sum(statistics.server_bytes) == 4 * (4 + BOUND)
            assert statistics.bytes_pushed == 4 * (5 * 4 + 3 * BOUND)
            assert statistics.bytes_pulled == 2 * 4 * 4


@every
def test_a_store_may_be_closed_twice(store: kv.KVStore) -> None:
    with store as same:
        assert same is store
        store.init("a", torch.zeros(1))
    store.close()
    store.close()
    calls: list[Callable[[], Any]] = [
        lambda: store.push("a", torch.zeros(1)),
        lambda: store.pull("a", torch.zeros(1)),
        lambda: store.pushpull("a", torch.zeros(1)),
        lambda: store.init("b", torch.zeros(1)),
        lambda: store.set_optimizer("sgd"),
        lambda: store.set_learning_rate(0.1),
    ]
    for call in calls:
        with pytest.raises(kv.UsageError, match="this store is closed"):
            call()


@every
def test_an_exception_passes_through_the_block(store: kv.KVStore) -> None:
    with pytest.raises(ZeroDivisionError), store:
        _ = 1 / 0
