"""MXNet's own unit tests of KVStore (unittest/test_kvstore.py, test_kvstore_custom.py)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import kvstore as kv
from kvstore.store import registry

SHAPE = (4, 4)
KEYS: list[Any] = [5, 7, 11]
STR_KEYS: list[Any] = ["b", "c", "d"]
BOTH = pytest.mark.parametrize(("key", "keys"), [(3, KEYS), ("a", STR_KEYS)], ids=["int", "str"])


def init_kv(key: Any, keys: list[Any], kind: str = "local") -> kv.KVStore:
    store = kv.create(kind)
    store.init(key, torch.zeros(SHAPE))
    store.init(keys, [torch.zeros(SHAPE)] * len(keys))
    return store


def check(tensors: Any, value: float) -> None:
    for tensor in tensors if isinstance(tensors, list) else [tensors]:
        assert torch.equal(tensor, torch.full(SHAPE, value))


def empties(count: int) -> list[torch.Tensor]:
    return [torch.empty(SHAPE) for _ in range(count)]


@BOTH
def test_single_kv_pair(key: Any, keys: list[Any]) -> None:
    store = init_kv(key, keys)
    store.push(key, torch.ones(SHAPE))
    out = torch.empty(SHAPE)
    store.pull(key, out=out)
    check(out, 1)


@BOTH
def test_list_kv_pair(key: Any, keys: list[Any]) -> None:
    store = init_kv(key, keys)
    store.push(keys, [torch.ones(SHAPE) * 4] * len(keys))
    outs = empties(len(keys))
    store.pull(keys, out=outs)
    check(outs, 4)


@pytest.mark.parametrize("kind", ["local", "device"])
@BOTH
def test_aggregator(key: Any, keys: list[Any], kind: str) -> None:
    store = init_kv(key, keys, kind)
    values = [torch.ones(SHAPE) for _ in range(4)]
    store.push(key, values)
    store.pull(key, out=values)
    check(values, 4)
    lists = [[torch.ones(SHAPE) * 2 for _ in range(4)] for _ in keys]
    store.push(keys, lists)
    store.pull(keys, out=lists)
    for values in lists:
        check(values, 8)


@BOTH
def test_init(key: Any, keys: list[Any]) -> None:
    store = kv.create()
    store.init(key, torch.ones(SHAPE) * 4)
    out = torch.zeros(SHAPE)
    store.pull(key, out=out)
    check(out, 4)


@BOTH
def test_updater(key: Any, keys: list[Any]) -> None:
    seen = []

    def updater(name: Any, received: torch.Tensor, stored: torch.Tensor) -> None:
        seen.append(name)
        stored += received

    store = init_kv(key, keys)
    store._set_updater(updater)
    store.push(key, [torch.ones(SHAPE)] * 4)
    outs = empties(4)
    store.pull(key, out=outs)
    check(outs, 4)
    for _ in range(4):
        store.push(keys, [[torch.ones(SHAPE)] * 4 for _ in keys])
    lists = [empties(4) for _ in keys]
    store.pull(keys, out=lists)
    for values in lists:
        check(values, 16)
    assert seen == [key, *(4 * keys)]


def test_get_type() -> None:
    assert kv.create("local_allreduce_cpu").type == "local_allreduce_cpu"


def test_invalid_pull() -> None:
    store = init_kv(3, KEYS)
    for keys in ("a", ["a", "b"]):
        with pytest.raises(kv.KVStoreError):
            store.pull(keys, out=empties(2))
    with pytest.raises(kv.KVStoreError):
        store.pull(4, out=torch.empty(SHAPE))


@pytest.mark.parametrize("kind", ["local", "device"])
@BOTH
def test_broadcast(key: Any, keys: list[Any], kind: str) -> None:
    store = kv.create(kind)
    outs = empties(4)
    store.broadcast(key, torch.ones(SHAPE), out=outs)
    check(outs, 1)
    lists = [empties(4) for _ in keys]
    store.broadcast(keys, [torch.ones(SHAPE)] * len(keys), out=lists)
    for values in lists:
        check(values, 1)


@pytest.mark.parametrize("kind", ["local", "device"])
@BOTH
def test_pushpull(key: Any, keys: list[Any], kind: str) -> None:
    store = init_kv(key, keys, kind)
    for factor in (1, 2):
        outs = empties(4)
        store.pushpull(key, [torch.full(SHAPE, float(factor))] * 4, out=outs)
        check(outs, 4 * factor)
    in_place = [[torch.ones(SHAPE) for _ in range(4)] for _ in keys]
    store.pushpull(keys, in_place)
    for values in in_place:
        check(values, 4)


# ---- row-sparse values


def rsp_ones() -> kv.RowSparse:
    return kv.RowSparse(torch.arange(4), torch.ones(SHAPE), SHAPE)


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("kind", ["local", "device"])
def test_row_sparse_pull(kind: str, count: int) -> None:
    store = init_kv(3, KEYS, kind)
    store.init(9, rsp_ones())
    rng = np.random.default_rng(count)
    values = [kv.RowSparse.zeros(SHAPE) for _ in range(count)]
    row_ids = [torch.from_numpy(rng.integers(4, size=4)).reshape(2, 2) for _ in range(count)]
    store.row_sparse_pull(9, out=values if count > 1 else values[0], row_ids=row_ids if count > 1 else row_ids[0])
    for value, ids in zip(values, row_ids, strict=True):
        expected = torch.zeros(SHAPE)
        expected[ids.reshape(-1)] = 1
        assert torch.equal(value.to_dense(), expected)


@pytest.mark.parametrize("kind", ["local", "device"])
@BOTH
def test_sparse_aggregator(key: Any, keys: list[Any], kind: str) -> None:
    store = kv.create(kind)
    store.init([key, *keys], [kv.RowSparse.zeros(SHAPE)] * (1 + len(keys)))
    generator = torch.Generator().manual_seed(4)

    def on_each_device() -> list[kv.RowSparse]:
        rows = torch.randn(4, *SHAPE, generator=generator).relu_()
        return [kv.RowSparse(torch.arange(4), each, SHAPE) for each in rows]

    values = on_each_device()
    total = sum(value.to_dense() for value in values)
    store.push(key, values)
    store.row_sparse_pull(key, out=values, row_ids=[torch.arange(4)] * 4)
    assert all(torch.equal(value.to_dense(), total) for value in values)
    lists = [on_each_device() for _ in keys]
    totals = [sum(value.to_dense() for value in values) for values in lists]
    store.push(keys, lists)
    store.row_sparse_pull(keys, out=lists, row_ids=[[torch.arange(4)] * 4] * len(keys))
    for values, total in zip(lists, totals, strict=True):
        assert all(torch.equal(value.to_dense(), total) for value in values)


def test_sparse_pull_is_ignored_and_dense_row_sparse_pull_is_refused() -> None:
    store = init_kv("a", STR_KEYS)
    store.init("rsp", rsp_ones())
    out = kv.RowSparse.zeros(SHAPE)
    with pytest.warns(UserWarning, match="pull leaves out tables"):
        store.pull("rsp", out=out, ignore_sparse=True)
    assert len(out) == 0
    store.pull("rsp", out=out, ignore_sparse=False)
    check(out.to_dense(), 1)
    with pytest.raises(kv.KVStoreError, match=r"'a' is .* and no table"):
        store.row_sparse_pull("a", out=torch.empty(SHAPE), row_ids=torch.arange(4))


@pytest.fixture
def teststore(monkeypatch: pytest.MonkeyPatch) -> kv.KVStore:
    """MXNet's TestStore: sums and copies in this process, and no more."""
    monkeypatch.setattr(registry, "REGISTERED", {})

    @kv.KVStore.register
    class TestStore(kv.KVStore):
        def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
            for target in out if isinstance(out, list) else [out]:
                target.copy_(value)

        def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0, *, wait: bool = True) -> kv.Ticket:
            values = value if isinstance(value, list) else [value]
            total = sum(values)
            for target in values if out is None else out if isinstance(out, list) else [out]:
                target.copy_(total)
            return kv.Ticket("pushpull", [key])

    return kv.create("teststore")


def test_custom_store(teststore: kv.KVStore) -> None:
    out = torch.empty(SHAPE)
    teststore.broadcast(1, torch.ones(SHAPE), out=out)
    check(out, 1)
    outs = empties(4)
    teststore.pushpull(1, [torch.ones(SHAPE)] * 4, out=outs)
    check(outs, 4)
    teststore.pushpull(1, outs)
    check(outs, 16)
    assert teststore.type == "teststore"
    assert (teststore.rank, teststore.num_workers) == (0, 1)


def test_custom_store_has_no_optimizer(teststore: kv.KVStore) -> None:
    assert not teststore.is_capable("optimizer")
    with pytest.raises(NotImplementedError):
        teststore.set_optimizer("sgd")
    with pytest.raises(NotImplementedError):
        teststore.save_optimizer_states("states")
    with pytest.raises(NotImplementedError):
        teststore.load_optimizer_states("states")
