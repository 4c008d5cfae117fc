"""MXNet's own unit tests of KVStore (unittest/test_kvstore.py, test_kvstore_custom.py), dense arrays."""

from __future__ import annotations

from typing import Any

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
