"""Where the segments of keys are: placed once, found in any order, and taken off the servers' loads when dropped."""

from __future__ import annotations

import pytest

from kvstore.errors import AlreadyInitialized, UsageError
from kvstore.placement import BLOCK
from kvstore.spec import Spec
from servers.scheduler.keys import Columns, Placements, first_other

BOUND, LONGEST = 1000, 2**40
SMALL, LARGE = Spec((10,), "float32"), Spec((3000,), "int8")


def test_a_large_array_has_a_segment_on_each_server_and_ids_go_on() -> None:
    placements = Placements([0, 0])
    placements.add({"large": LARGE}, BOUND, LONGEST)
    placements.add({"small": SMALL}, BOUND, LONGEST)
    assert placements.columns(["large"]) == Columns([2], [0, 1], [0, 1], [0, 1536], [1536, 3000])
    assert placements.columns(["small", "large"]) == Columns(
        [1, 2], [2, 0, 1], [1, 0, 1], [0, 0, 1536], [10, 1536, 3000]
    )
    assert placements.columns([]) == Columns([], [], [], [], [])


def test_loads_are_shared_and_given_back() -> None:
    loads = [0, 0]
    one, other = Placements(loads), Placements(loads)
    one.add({"small": SMALL}, BOUND, LONGEST)
    other.add({"small": SMALL, "large": LARGE}, BOUND, LONGEST)
    assert sum(loads) == 2 * SMALL.nbytes + LARGE.nbytes
    other.clear()
    assert loads == [SMALL.nbytes, 0]
    assert other.specs == {}


def test_a_key_without_a_value_may_be_placed_anew_and_one_with_a_value_may_not() -> None:
    loads = [0]
    placements = Placements(loads)
    placements.add({"a": SMALL, "b": SMALL}, BOUND, LONGEST)
    before = placements.columns(["a", "b"])
    placements.add({"a": SMALL}, BOUND, LONGEST)
    assert placements.columns(["a", "b"]) == before, "as it was, it stays where it was"
    placements.add({"a": LARGE}, BOUND, LONGEST)
    assert loads == [LARGE.nbytes + SMALL.nbytes]
    assert placements.columns(["a"]).stops == [3000]
    placements.ready.add("b")
    with pytest.raises(AlreadyInitialized, match="key 'b' is already initialized"):
        placements.add({"c": SMALL, "b": SMALL}, BOUND, LONGEST)
    assert "c" not in placements.specs


def test_what_has_no_value_is_missing() -> None:
    placements = Placements([0])
    placements.add({"a": SMALL, "b": SMALL}, BOUND, LONGEST)
    placements.ready.add("a")
    assert placements.missing(["a", "b", "c"]) == {"b", "c"}


def test_keys_that_were_placed_call_by_call_may_be_too_many_for_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    most = 1 << 10
    monkeypatch.setattr("kvstore.placement.MAX_SEGMENTS", most)
    half = Spec((most // 2 * BLOCK + 1,), "int8")
    placements = Placements([0])
    for key in ("a", "b"):
        placements.add({key: half}, BOUND, longest=1)
    assert len(placements.columns(["a"]).ids) == most // 2 + 1
    with pytest.raises(UsageError, match="one call of init may have"):
        placements.columns(["a", "b"])


def test_the_first_key_with_another_spec_is_found() -> None:
    specs = {"a": SMALL, "b": LARGE, "c": SMALL}
    assert first_other(specs, {"x": LARGE, "c": Spec((10,), "float32")}) is None
    assert first_other(specs, {"c": LARGE, "b": SMALL}) == "b"
    placements = Placements([0])
    placements.add({"a": LARGE}, BOUND, LONGEST)
    assert placements.contradicted(specs) == "a"
