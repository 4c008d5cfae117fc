"""Names of stores: built in, registered, replaced, unknown; and checks of options."""

from __future__ import annotations

from typing import Any

import pytest

import kvstore as kv
from kvstore.errors import UnknownName, UsageError
from kvstore.store.registry import Builtin, find, flag, register, require_options, store_names


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
