"""Bundles: what goes in comes out; nothing else goes in, and no bytes do harm."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvstore as kv
from workers.common import bundle

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda its: st.lists(its) | st.tuples(its, its) | st.dictionaries(st.text() | st.integers(0, 9), its),
    max_leaves=20,
)


@given(PLAIN)
def test_plain_values_come_back_with_their_types(value: Any) -> None:
    packed, tensors = bundle.pack(value)
    back = bundle.unpack(packed, tensors)
    assert back == value
    assert repr(back) == repr(value)


def test_tensors_go_beside_it() -> None:
    value = {"a": [torch.ones(2, 3), {"b": (torch.tensor(5), None)}], 3: torch.zeros(0, dtype=torch.bfloat16)}
    packed, tensors = bundle.pack(value)
    assert [(form.dtype, form.shape, form.cpu) for form in bundle.forms(packed)] == [
        (torch.float32, (2, 3), True),
        (torch.int64, (), True),
        (torch.bfloat16, (0,), True),
    ]
    back = bundle.unpack(packed, tensors)
    assert back["a"][0] is tensors[0]
    assert back["a"][1]["b"] == (tensors[1], None)


def test_numpy_numbers_become_plain_ones() -> None:
    assert bundle.unpack(*bundle.pack([np.float32(0.5), np.int64(3)])) == [0.5, 3]


def deep() -> Any:
    value: Any = 0
    for _ in range(40):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": [1, object()]}, r"\['a'\]\[1\] is of type object"),
        (print, "the value is of type builtin_function"),
        (2**63, "more than 64 bits"),
        (torch.eye(2).to_sparse(), "layout torch.sparse_coo"),
        (deep(), "nested more than 32 deep"),
    ],
)
def test_all_else_is_refused_by_name(value: Any, text: str) -> None:
    with pytest.raises(kv.UsageError, match=text):
        bundle.pack(value)


@pytest.mark.parametrize(
    "tree",
    [
        [],
        ["set", 1],
        [["list"], 1],
        {"a": 1},
        ["dict", [1]],
        ["dict", [["list"], 1]],
        ["tensor", "float32", [2]],
        ["tensor", "float31", [2], True],
        ["tensor", "float32", [-2], True],
        ["tensor", "float32", [2**50], True],
        ["tensor", "float32", [True], True],
        ["tensor", "float32", [2], 1],
    ],
)
def test_other_trees_are_no_bundles(tree: Any) -> None:
    with pytest.raises(kv.WireError, match="not a bundle"):
        bundle.forms(msgpack.packb(tree))


@given(st.binary())
def test_any_bytes_are_a_bundle_or_a_wire_error(data: bytes) -> None:
    try:
        bundle.forms(data)
    except kv.WireError:
        return


def test_the_tensors_must_be_those_of_the_bundle() -> None:
    packed, _ = bundle.pack([torch.zeros(2)])
    for tensors in ([], [torch.zeros(3)], [torch.zeros(2).double()]):
        with pytest.raises(kv.WireError, match="do not have the dtypes and shapes of this bundle"):
            bundle.unpack(packed, tensors)
    with pytest.raises(kv.WireError, match="more tensors"):
        bundle.unpack(packed, [torch.zeros(2), torch.zeros(2)])
