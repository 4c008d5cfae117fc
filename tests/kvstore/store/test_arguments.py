"""The many shapes of (key, value) arguments."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
import pytest

from kvstore.errors import UsageError
from kvstore.store.arguments import group, one_kind


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
