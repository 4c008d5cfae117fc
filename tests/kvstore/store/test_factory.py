"""``create`` with every name, alias and option; and the arguments of calls, in any of their forms."""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
import torch
from threaded import ThreadedJob
from waiting import LONG

import kvstore as kv
from kvstore.client import DistStore
from kvstore.errors import UnknownName, UsageError
from kvstore.store import registry as names_of_stores
from kvstore.store.arguments import RowRequest, array_outs, group, one_kind, requests_of
from kvstore.store.local import DeviceStore, LocalStore
from kvstore.store.registry import Builtin, find, flag, register, require_options, store_names
from kvstore.store.wanted_rows import described, wanted_rows
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
        store = kv.create(name.upper())
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
    with pytest.raises(kv.ConfigError, match=r"launch\.py -n 2 -s 2"):
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


@pytest.mark.parametrize(
    ("key", "value", "grouped"),
    [
        ("w", 1, {"w": [1]}),
        (3, [1, 2], {3: [1, 2]}),
        ("w", (1, 2), {"w": [1, 2]}),
        (["w"], [1], {"w": [1]}),
        (["w"], [[1, 2]], {"w": [1, 2]}),
        (("a", "b"), (1, [2, 3]), {"a": [1], "b": [2, 3]}),
        ([1, 2, 1], [1, 2, 3], {1: [1, 3], 2: [2]}),
        ([1, 1], [[1, 2], 3], {1: [1, 2, 3]}),
    ],
)
def test_values_are_grouped_by_key(key: Any, value: Any, grouped: Any) -> None:
    assert group(key, value) == grouped


def test_the_order_of_keys_stays() -> None:
    assert list(group(["b", "a", "c"], [1, 2, 3])) == ["b", "a", "c"]


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ([], [], "the list of keys is empty"),
        (["a", "b"], [1], "2 keys need a list of 2 values, not 1"),
        (["a", "b"], np.zeros(2), "not a single ndarray"),
        (["a"], 1, "not a single int"),
        ("a", [], "the list of values for key 'a' is empty"),
        (["a", "b"], [1, []], "the list of values for key 'b' is empty"),
        (1.5, 1, "a key is an int or a str, not float"),
        ({"a": 1}, 1, "not dict"),
        ([["a"]], [1], "not list"),
        (None, 1, "not NoneType"),
    ],
)
def test_what_does_not_match(key: Any, value: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        group(key, value)


def test_one_kind_of_keys() -> None:
    assert one_kind(["a", "b"], None) is str
    assert one_kind([1, 2], int) is int
    for keys, kind in (([1, "a"], None), (["a"], int), ([1], str)):
        with pytest.raises(UsageError, match="keys of one kind"):
            one_kind(keys, kind)  # type: ignore[arg-type]


def test_a_subclass_is_of_the_kind_it_refines() -> None:
    class Layer(IntEnum):
        FIRST = 1

    assert one_kind([Layer.FIRST, 2], None) is int
    assert one_kind([np.str_("a"), "b"], None) is str


# ---- rows that are wanted

A, B = np.array([1, 2]), np.array([3])


@pytest.mark.parametrize(
    ("key", "out", "row_ids", "pairs"),
    [
        ("w", None, A, {"w": [(A, None)]}),
        ("w", "out", A, {"w": [(A, "out")]}),
        ("w", ["x", "y"], A, {"w": [(A, "x"), (A, "y")]}),
        ("w", ["x", "y"], [A], {"w": [(A, "x"), (A, "y")]}),
        ("w", ["x", "y"], [A, B], {"w": [(A, "x"), (B, "y")]}),
        ("w", None, [A, B], {"w": [(A, None), (B, None)]}),
        (["w", "v"], None, [A, B], {"w": [(A, None)], "v": [(B, None)]}),
        (["w", "v"], ["x", ["y", "z"]], [A, B], {"w": [(A, "x")], "v": [(B, "y"), (B, "z")]}),
        (["w", "w"], ["x", "y"], [A, B], {"w": [(A, "x"), (B, "y")]}),
        (["w", "v"], None, [None, "round"], {"w": [(None, None)], "v": [("round", None)]}),
    ],
)
def test_row_ids_are_grouped_with_their_outs(key: Any, out: Any, row_ids: Any, pairs: Any) -> None:
    requests = requests_of(key, out, row_ids)
    grouped = {key: [(each.ids, each.out) for each in its] for key, its in requests.by_key.items()}
    assert list(grouped) == list(pairs)
    for key, its in grouped.items():
        assert all(ids is a and out == b for (ids, out), (a, b) in zip(its, pairs[key], strict=True))


@pytest.mark.parametrize("row_ids", [[1, 2], [[1, 2], [3, 4]], [np.int64(1), np.int64(2)], (1, 2), 5])
def test_a_list_of_numbers_is_one_array_of_ids(row_ids: Any) -> None:
    ((request,),) = requests_of("w", None, row_ids).by_key.values()
    assert request.ids is row_ids


def test_what_is_made_is_returned_in_the_form_of_the_arguments() -> None:
    for key, row_ids, expected in (
        ("w", A, 0),
        ("w", [A, B], [0, 1]),
        (["w"], [A], [0]),
        (["w", "v", "w"], [A, [A, B], B], [0, [2, 3], 1]),
    ):
        requests = requests_of(key, None, row_ids)
        for number, request in enumerate(each for its in requests.by_key.values() for each in its):
            request.out = number
        assert requests.result() == expected
    assert requests_of("w", "out", A).result() is None


@pytest.mark.parametrize(
    ("key", "out", "row_ids", "text"),
    [
        ("w", "out", None, "row_ids is missing"),
        ([], None, [], "the list of keys is empty"),
        (["w", "v"], None, A, "2 keys need a list of 2 row_ids, not a single ndarray"),
        (["w", "v"], None, [A], "2 keys need a list of 2 row_ids, not 1"),
        (["w", "v"], "out", [A, B], "2 keys need a list of 2 outs, not a single str"),
        ("w", ["x", "y", "z"], [A, B], "key 'w': 3 outs need one row_ids or 3, not 2"),
        ("w", [], A, "the list of values for key 'w' is empty"),
        (1.5, None, A, "a key is an int or a str"),
    ],
)
def test_row_ids_that_do_not_match(key: Any, out: Any, row_ids: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        requests_of(key, out, row_ids)


def test_arrays_beside_tables_have_no_row_ids() -> None:
    (requests,) = requests_of(["w"], None, [None]).by_key.values()
    assert array_outs("w", requests, ["value"]) == ["value"]
    with pytest.raises(UsageError, match="its row_ids must be None"):
        array_outs("w", [RowRequest(A, None)], ["value"])
    assert array_outs("w", [RowRequest(None, "x"), RowRequest(None, "y")], ["value"]) == ["x", "y"]


TABLE = kv.Table(shape=(9, 2))


def wanted(requests: list[RowRequest], pushed: list[Any] | None = None) -> Any:
    return wanted_rows("pushpull", "t", 3, TABLE, requests, pushed)


def test_a_call_is_described_by_key_and_worker() -> None:
    assert described("push", "t", 3) == "push of key 't' by worker 3"


def test_without_ids_it_is_what_is_pushed() -> None:
    values = [kv.RowSparse([5, 1], torch.zeros(2, 2)), kv.RowSparse([7], torch.zeros(1, 2))]
    requests = [RowRequest(None, None), RowRequest(None, out := torch.zeros(1, 2))]
    assert wanted(requests, values).ids.tolist() == [1, 5, 7]
    assert [request.out for request in requests] == [values[0], out]
    assert wanted([RowRequest("round", None)], values).changed


@pytest.mark.parametrize(
    ("requests", "pushed", "text"),
    [
        ([RowRequest(None, None)], None, "pushpull of key 't' by worker 3: row_ids is None; pass the ids of rows$"),
        ([RowRequest("round", None)], None, "row_ids is 'round'; pass the ids of rows$"),
        ([RowRequest("all", None)], [], "row_ids is 'all'; pass the ids of rows, or 'round'"),
        ([RowRequest(None, None)], [], "1 outs without row_ids need as many values, not 0"),
        ([RowRequest([9], None)], [], "id 9 at position 0"),
    ],
)
def test_requests_that_mean_nothing(requests: list[RowRequest], pushed: list[Any] | None, text: str) -> None:
    with pytest.raises(kv.UsageError, match=text):
        wanted(requests, pushed)
