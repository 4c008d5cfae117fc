"""What a list of tables is: its stripes on each server, and how rows travel."""

from __future__ import annotations

import pytest
from placed import entries_for

from kvstore.client.plans import RowPlan, RowPlans
from kvstore.errors import KeyNotInitialized, Mismatch
from kvstore.spec import Spec
from kvstore.table import Table, TableSpec

SPECS: dict[str, Spec] = {
    "a": Spec((100,), "float32"),
    "t": TableSpec.of(Table(shape=(9, 4))),
    "g": TableSpec.of(Table(dim=4, codec="fp16")),
    "u": TableSpec.of(Table(shape=(9, 4), init="normal")),
    "long": TableSpec.of(Table(shape=(2**31 + 1, 4))),
    "odd": TableSpec.of(Table(shape=(9, 3))),
}


def test_each_server_has_a_segment_of_each_table():
    entries = entries_for(SPECS, servers=3, bound=10)
    plan = RowPlan(entries, ["g", "t"])
    assert [parcel.server for parcel in plan.parcels] == [0, 1, 2]
    for parcel in plan.parcels:
        assert [segment.key for segment in parcel.segments] == ["g", "t"]
        assert {segment.server for segment in parcel.segments} == {parcel.server}
        assert parcel.ids == [segment.id for segment in parcel.segments]
    assert plan.places.tolist() == [entries["g"].place, entries["t"].place]
    assert plan.codecs == ["fp16", "none"]


@pytest.mark.parametrize(("keys", "wide"), [(["t", "u"], False), (["t", "g"], True), (["long"], True)])
def test_ids_are_as_wide_as_the_widest_table_needs(keys: list[str], wide: bool):
    assert RowPlan(entries_for(SPECS, 2, 10), keys).wide == wide


@pytest.mark.parametrize(("keys", "nbytes"), [(["t", "u"], 16), (["t", "g"], None), (["odd"], None), (["g"], None)])
def test_only_rows_that_are_alike_are_moved_as_items(keys: list[str], nbytes: int | None):
    item = RowPlan(entries_for(SPECS, 2, 10), keys).item
    assert (None if item is None else item.itemsize) == nbytes


def test_plans_are_of_tables_that_are_known():
    plans = RowPlans(entries_for(SPECS, 2, 10))
    assert plans.of(["t", "g"]) is plans.of(["t", "g"])
    assert plans.require("g").grows
    with pytest.raises(Mismatch, match=r"'a' is float32\[100\], an array.*kv\.Table"):
        plans.of(["t", "a"])
    with pytest.raises(KeyNotInitialized, match="'x'"):
        plans.require("x")
