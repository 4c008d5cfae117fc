"""Where updates happen: Gluon's table, and which stores a Trainer can have."""

from __future__ import annotations

from typing import Any

import pytest
from threaded import ThreadedJob
from torch import nn
from trained import network, on_devices, weights

import kvstore as kv
from kvstore.client import DistStore
from workers import Trainer


def decided(devices: int, environ: str = "1", **how: Any) -> tuple[str | None, bool]:
    """The type of the store that is used, and whether it updates."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MXNET_UPDATE_ON_KVSTORE", environ)
        trainer = Trainer(on_devices(weights(*[0.0] * devices)), "sgd", **how)
    return (None if trainer.store is None else trainer.store.type), trainer.update_on_kvstore


@pytest.mark.parametrize(
    ("devices", "how", "decision"),
    [
        (1, {}, (None, False)),
        (2, {}, ("device", True)),
        (1, {"kvstore": None}, (None, False)),
        (1, {"kvstore": "local"}, (None, False)),
        (2, {"kvstore": "local"}, ("local", True)),
        (2, {"kvstore": "local", "environ": "0"}, ("local", False)),
        (2, {"kvstore": "device", "environ": "0"}, ("device", False)),
        (2, {"kvstore": "device", "environ": "0", "update_on_kvstore": True}, ("device", True)),
        (2, {"kvstore": "device", "update_on_kvstore": False}, ("device", False)),
        (1, {"kvstore": "device", "update_on_kvstore": True}, ("device", True)),
        (1, {"kvstore": "device", "update_on_kvstore": False}, ("device", False)),
        (1, {"kvstore": None, "update_on_kvstore": True}, (None, False)),
    ],
)
def test_local_stores(devices: int, how: dict[str, Any], decision: tuple[str | None, bool]) -> None:
    assert decided(devices, **how) == decision


def test_several_devices_need_a_store() -> None:
    with pytest.raises(kv.UsageError, match="pass kvstore='device'"):
        Trainer(on_devices(weights(0.0, 0.0)), "sgd", kvstore=None)


@pytest.mark.parametrize(
    ("mode", "environ", "wanted", "updates"),
    [
        ("sync", "1", None, True),
        ("sync", "0", None, False),
        ("sync", "1", False, False),
        ("sync", "0", True, True),
        ("async", "1", None, True),
        ("async", "0", None, True),
        ("async", "0", True, True),
    ],
)
def test_dist_stores(
    cluster: ThreadedJob, monkeypatch: pytest.MonkeyPatch, mode: str, environ: str, wanted: bool | None, updates: bool
) -> None:
    monkeypatch.setenv("MXNET_UPDATE_ON_KVSTORE", environ)

    def work(store: DistStore) -> bool:
        return Trainer(on_devices(weights(0.0)), "sgd", kvstore=store, update_on_kvstore=wanted).update_on_kvstore

    assert cluster.run(work, mode=mode) == [updates] * 2


def test_an_async_store_must_update(cluster: ThreadedJob) -> None:
    def work(store: DistStore) -> None:
        with pytest.raises(kv.UsageError, match="update_on_kvstore=False does not work with a 'dist_async' store"):
            Trainer(on_devices(weights(0.0)), "sgd", kvstore=store, update_on_kvstore=False)

    cluster.run(work, mode="async")


def test_a_store_that_cannot_update_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    store = kv.create("device")
    monkeypatch.setattr(store, "is_capable", lambda capability: False)
    trainer = Trainer(on_devices(weights(0.0, 0.0)), "sgd", kvstore=store)
    assert (trainer.store, trainer.update_on_kvstore) == (store, False)


@pytest.mark.parametrize("store", ["local", "dist_sync"])
def test_a_store_updates_for_one_trainer(cluster: ThreadedJob, store: str) -> None:
    def work(store: kv.KVStore) -> None:
        body, head = nn.Linear(6, 4), nn.Linear(4, 3)
        how: dict[str, Any] = {"kvstore": store, "update_on_kvstore": True}
        with pytest.raises(kv.UnknownName):
            Trainer(body.named_parameters("body"), "sgd", {"nonsense": 1}, **how)
        Trainer(body.named_parameters("body"), "sgd", {"learning_rate": 0.5}, **how)
        with pytest.raises(
            kv.UsageError, match=r"already updates for another Trainer; make a second store with kvstore\.c"
        ):
            Trainer(head.named_parameters("head"), "sgd", **how)
        assert store.learning_rate == 0.5

    if store == "local":
        work(kv.create(store))
    else:
        cluster.run(work)


def test_trainers_that_sum_on_one_store_have_names_of_their_own() -> None:
    store = kv.create("local")
    model, how = network(), {"kvstore": store, "update_on_kvstore": False}
    Trainer({f"one.{name}": its for name, its in model.named_parameters()}, **how)
    Trainer({f"two.{name}": its for name, its in model.named_parameters()}, **how)
    with pytest.raises(
        kv.UsageError, match=r"another model's values: key 'one.0.weight' is already initialized; make a s"
    ):
        Trainer({f"one.{name}": its for name, its in model.named_parameters()}, **how)
