"""``create``: every name and alias, and what a wrong name or option costs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from threaded import ThreadedJob
from waiting import LONG

import kvstore as kv
from kvstore.client import DistStore
from kvstore.errors import UnknownName, UsageError
from kvstore.store import registry as names_of_stores
from kvstore.store.local import DeviceStore, LocalStore
from kvstore.store.registry import Builtin, find, flag, register, require_options, store_names
from kvstore.ticket import WaitLimits

LOCAL = ["local", "local_update_cpu", "local_allreduce_cpu"]
DEVICE = ["device", "local_allreduce_device"]
SYNC = ["dist", "dist_sync"]
DEVICE_SYNC = ["dist_device_sync", "dist_sync_device"]
ASYNC = ["dist_async", "dist_async_device", "dist_device_async"]
NAMES = [*LOCAL, *DEVICE, *SYNC, *DEVICE_SYNC, *ASYNC]


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process is the only worker of a job with two servers."""
    with ThreadedJob(workers=1, servers=2) as cluster:
        session = cluster.run_sessions(lambda session: session)[0]
        monkeypatch.setattr("kvstore.client.dist.shared", lambda config: session)
        yield


@pytest.mark.parametrize(("names", "cls"), [(LOCAL, LocalStore), (DEVICE, DeviceStore)])
def test_local_names(names: list[str], cls: type[kv.KVStore]) -> None:
    for name in names:
        store = kv.create(name)
        assert type(store) is cls
        assert store.type == name


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize("name", [*SYNC, *DEVICE_SYNC, *ASYNC])
def test_dist_names(name: str) -> None:
    with kv.create(name.upper()) as store:
        assert isinstance(store, DistStore)
        assert store.type == name
        assert (store.rule.mode == "async") == (name in ASYNC)
        assert ("device" in store.companion().type) == ("device" in name)


def test_a_local_store_is_the_default() -> None:
    assert kv.create().type == "local"


@pytest.mark.parametrize("name", ["foo", "", "p3", "nccl", "dist_sync2", "localhost", " local"])
def test_any_other_name_lists_them_all(name: str) -> None:
    with pytest.raises(kv.UnknownName) as caught:
        kv.create(name)
    assert repr(name) in str(caught.value)
    assert str(caught.value).partition("choose from ")[2].partition(";")[0].split(", ") == names_of_stores.store_names()
    assert set(NAMES) <= set(names_of_stores.store_names())


@pytest.mark.parametrize("name", [None, 3, b"local", ["local"]])
def test_a_name_is_a_str(name: Any) -> None:
    with pytest.raises(TypeError, match="the name of a store is a str"):
        kv.create(name)


@pytest.mark.parametrize("name", [*SYNC, *DEVICE_SYNC, *ASYNC])
def test_a_dist_store_outside_a_job_says_what_to_run(name: str) -> None:
    with pytest.raises(kv.ConfigError, match=r"launch\.py"):
        kv.create(name)


def test_an_unknown_option_lists_those_there_are() -> None:
    with pytest.raises(kv.UnknownName, match="no option 'deadline'; choose from timeout, bigarray_bound"):
        kv.create("dist_sync", deadline=3)


@pytest.mark.usefixtures("job")
def test_options_of_dist_stores() -> None:
    store = kv.create("dist_sync", timeout=3)
    assert isinstance(store, DistStore)
    assert store.limits == WaitLimits(3, 3)
    default = kv.create("dist_sync", timeout=None)
    assert isinstance(default, DistStore)
    assert default.limits == WaitLimits(LONG, LONG)
    for options, elements, cut in [({}, 999, False), ({}, 1000, True), ({"bigarray_bound": 300}, 300, True)]:
        store = kv.create("dist_sync", **options)
        store.init("w", np.zeros(elements))
        assert all(store.statistics().server_bytes) == cut, "over both servers, or whole on one"


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize(
    "option", [{"timeout": 0}, {"timeout": "3"}, {"timeout": -1}, {"bigarray_bound": 0}, {"bigarray_bound": 1.5}]
)
def test_options_that_cannot_be(option: dict[str, Any]) -> None:
    with pytest.raises(kv.UsageError, match=next(iter(option))):
        kv.create("dist_sync", **option)


@pytest.mark.usefixtures("job")
def test_the_old_name_of_the_timeout_warns() -> None:
    with pytest.warns(DeprecationWarning, match="timeout_s= is now timeout=") as caught:
        store = kv.create("dist_sync", timeout_s=3)
    assert caught[0].filename == __file__
    assert isinstance(store, DistStore)
    assert store.limits == WaitLimits(3, 3)


@pytest.mark.usefixtures("job")
def test_a_job_has_room_for_so_many_stores() -> None:
    for _ in range(256):
        kv.create("dist_sync")
    with pytest.raises(kv.UsageError, match="256"):
        kv.create("dist_sync")


def make(**_options: Any) -> Any:
    """Stands for what makes a store."""


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("local_allreduce_cpu", "local"),
        ("Local", "local"),
        ("local_allreduce_device", "device"),
        ("dist", "dist_sync"),
        ("DIST_SYNC_DEVICE", "dist_device_sync"),
        ("dist_device_async", "dist_async"),
        ("dist_ssp_device", "dist_ssp"),
    ],
)
def test_an_alias_means_the_canonical_name(name: str, canonical: str) -> None:
    found = find(name)
    assert isinstance(found, Builtin)
    assert found.canonical == canonical


def test_an_unknown_name_lists_those_there_are() -> None:
    with pytest.raises(UnknownName) as caught:
        find("p3")
    assert str(caught.value) == f"no store 'p3'; choose from {', '.join(store_names())}"


@pytest.mark.usefixtures("registry")
def test_what_is_registered_is_found_and_listed_last() -> None:
    register("mine", make)
    assert find("Mine") is make
    assert store_names()[-1] == "mine"


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("name", ["Local", "Mine"])
def test_replacing_a_store_warns(name: str) -> None:
    first, second = (type(name, (kv.KVStore,), {}) for _ in range(2))
    if name == "Mine":
        kv.KVStore.register(first)
    with pytest.warns(UserWarning, match=f"'{name.lower()}' replaces"):
        kv.KVStore.register(second)
    assert type(kv.create(name)) is second


def test_an_option_that_there_is_not_lists_those_there_are() -> None:
    require_options("mine", {"a": 1}, ("a", "b"))
    with pytest.raises(UnknownName, match="a 'mine' store has no option 'c'; choose from a, b"):
        require_options("mine", {"a": 1, "c": 2}, ("a", "b"))
    with pytest.raises(UnknownName, match="has no option 'c'; it has none"):
        require_options("mine", {"c": 2}, ())


def test_a_flag_is_true_or_false_and_nothing_else() -> None:
    assert (flag("x", True), flag("x", False), flag("x", None)) == (True, False, False)
    for value in (1, 0, "yes"):
        with pytest.raises(UsageError, match=r"x=.* must be True or False"):
            flag("x", value)
