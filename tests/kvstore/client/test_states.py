"""The states of an optimizer, cut over servers and put together again: whatever the placement, they are the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from placed import entries_for

from kvstore.client.requests import assemble, cut
from kvstore.errors import UsageError
from kvstore.spec import Key, Spec


def same(one: Any, two: Any) -> bool:
    return one.keys() == two.keys() and all(
        torch.equal(one[where], two[where]) and one[where].dtype == two[where].dtype for where in one
    )


shapes = st.lists(st.integers(0, 6), max_size=3).map(tuple)


@settings(max_examples=60)
@given(st.dictionaries(st.integers(0, 9), shapes, max_size=5), st.integers(1, 5), st.integers(1, 40))
def test_cut_and_assemble_are_inverses_for_any_placement(shapes: dict[Key, Any], servers: int, bound: int) -> None:
    specs = {key: Spec(shape, "float32") for key, shape in shapes.items()}
    entries = entries_for(specs, servers, bound)
    whole = {(key, "sum"): torch.randn(spec.shape) for key, spec in specs.items()}
    whole |= {(key, "step"): torch.tensor(float(len(spec.shape))) for key, spec in specs.items()}
    segments = cut(whole, entries)
    for (segment, name), value in segments.items():
        if name == "sum" and entries[segment.key].cut:
            assert value.shape == (segment.stop - segment.start,)
    assert same(assemble(segments, entries), whole)
    assert same(cut(assemble(segments, entries), entries_for(specs, 2, 3)), cut(whole, entries_for(specs, 2, 3)))


def test_state_that_is_not_element_by_element_cannot_be_cut() -> None:
    entries = entries_for({"w": Spec((4, 4), "float32")}, 2, 1)
    with pytest.raises(UsageError, match="row_var of key 'w' cannot be cut over 2 servers"):
        cut({("w", "row_var"): torch.ones(4, 1)}, entries)
