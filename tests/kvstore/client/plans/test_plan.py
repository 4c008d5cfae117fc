"""Plans of lists of keys: kept, checked at a glance, and made anew when messages change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from placed import entries_for

from kvstore.client.plans import PARTS, Pieces, Plans, views_of
from kvstore.errors import KeyNotInitialized
from kvstore.spec import Key, Spec

SPECS: dict[Key, Spec] = {"w": Spec((4, 3), "float32"), "n": Spec((5,), "int64"), "cut": Spec((100,), "float32")}


def plans(specs: dict[Key, Spec] = SPECS, message_bytes: int = 1 << 20) -> Plans:
    made = Plans(Pieces(message_bytes))
    made.entries.add(entries_for(specs, servers=2, bound=50))
    return made


def test_a_list_that_comes_again_has_the_same_plan() -> None:
    made = plans()
    plan = made.known(["w", "n"])
    assert plan is not None
    assert made.known(("w", "n")) is plan
    assert made.of(iter(["w", "n"])) is plan
    assert made.known(["n", "w"]) is not plan
    assert made.known("w") is made.of(["w"])


@pytest.mark.parametrize("key", [["w", "w"], ["w", "other"], "other", [], [["w"]], None, 1.0])
def test_lists_that_are_not_on_the_fast_path(key: Any) -> None:
    assert plans().known(key) is None


@pytest.mark.parametrize("key", [True, 1.0])
def test_keys_that_only_equal_a_key_are_not_it(key: Any) -> None:
    made = plans({1: Spec((1,), "float32")})
    assert made.known(1) is not None
    assert made.known(key) is None
    assert made.known([key]) is None


def test_a_key_that_was_not_initialized() -> None:
    with pytest.raises(KeyNotInitialized, match="'other' has no value on this worker; call init first"):
        plans().of(["w", "other"])


def test_a_plan_knows_the_arrays_of_its_keys() -> None:
    plan = plans().of(["n", "w"])
    assert plan.specs == [SPECS["n"], SPECS["w"]]
    assert plan.places.tolist() == [1, 0]
    assert not plan.floats
    assert plans().of(["w", "cut"]).floats


def test_arrays_that_do_not_fit_are_left_to_the_slow_path() -> None:
    plan = plans().of(["w", "n"])
    fitting = [torch.zeros(4, 3), torch.zeros(5, dtype=torch.int64)]
    assert plan.values(fitting) is not None
    assert plan.outputs(fitting) is not None
    for arrays in (fitting[:1], [torch.zeros(3, 4), fitting[1]], [torch.zeros(4, 3), torch.zeros(5)], fitting[0]):
        assert plan.values(arrays) is None
        assert plan.outputs(arrays) is None


def test_messages_have_more_bytes_from_when_they_are_folded() -> None:
    made = plans(message_bytes=64)
    before = made.of(["cut", "w"])
    assert len(before.parcels) > 2
    made.fold(100, small=20)
    after = made.of(["cut", "w"])
    assert after is not before
    assert len(after.parcels) == 2
    assert {parcel.small for parcel in after.parcels} == {20}


def test_views_are_of_the_ranges_in_a_parcel() -> None:
    plan = plans().of(["cut", "w"])
    tensors = [torch.arange(100.0), torch.arange(12.0).view(4, 3)]
    views = {parcel.server: views_of(parcel, tensors) for parcel in plan.parcels}
    assert views[0][0].tolist() == list(range(50))
    assert views[1][0].tolist() == list(range(50, 100))
    (whole,) = views[0][1:] or views[1][1:]
    assert whole.tolist() == list(range(12))
    whole[0] = -1
    assert tensors[1][0, 0] == -1


def test_in_a_small_store_messages_are_small_and_as_many_of_them_on_the_way() -> None:
    made = Plans(Pieces(400, 40, 2))
    small: dict[Key, Spec] = {number: Spec((10,), "float32") for number in range(20)}
    made.entries.add(entries_for(small, servers=2, bound=50))
    plan = made.of([0, 1, 2, 3])
    assert [parcel.nbytes for parcel in plan.parcels] == [40, 40, 40, 40]
    assert plan.weight == 10
    made.entries.add(entries_for({"large": Spec((100 * 2 * PARTS,), "float32")}, servers=2, bound=10**9))
    plan = made.of([4, 5, 6, 7])
    assert [parcel.nbytes for parcel in plan.parcels] == [80, 80]
    assert plan.weight == 1
