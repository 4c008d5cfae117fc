"""Shapes, dtypes and keys: what may be stored, and how a refusal reads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvstore.errors import Mismatch, UsageError
from kvstore.lineage import NOWHERE, UNKNOWN, Version, new_lineage, next_lineage
from kvstore.spec import ITEMSIZE, Key, Spec, as_shape, check_key, require_floats, require_same, shorten, without_value
from kvstore.table import Table, TableSpec


def test_sizes() -> None:
    spec = Spec((2, 3, 4), "float16")
    assert (spec.size, spec.itemsize, spec.nbytes) == (24, 2, 48)
    assert str(spec) == "float16[2, 3, 4]"


def test_a_number_has_one_element_and_an_empty_array_none() -> None:
    assert Spec((), "float64").nbytes == 8
    assert Spec((3, 0), "float64").nbytes == 0


def test_an_unknown_dtype_lists_those_there_are() -> None:
    with pytest.raises(UsageError, match="complex64 cannot be stored") as caught:
        Spec((1,), "complex64")
    assert all(name in str(caught.value) for name in ITEMSIZE)


@pytest.mark.parametrize("shape", [(1,) * 33, (-1,), (2**48 + 1,), (2**30, 2**30)])
def test_a_shape_that_cannot_be_stored(shape: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="cannot be stored"):
        Spec(shape, "float32")


@pytest.mark.parametrize("given", [3, np.int64(3), (3,), [3], np.array([3]), torch.Size([3])], ids=str)
def test_a_number_is_a_shape_too(given: Any) -> None:
    shape = as_shape(given)
    assert shape == (3,)
    assert type(shape[0]) is int


@pytest.mark.parametrize("given", [2.0, "3", None, (2, 2.5), torch.tensor(0.5)], ids=str)
def test_what_is_no_shape(given: Any) -> None:
    with pytest.raises(UsageError, match="a shape is an integer or a tuple of integers, not "):
        as_shape(given)


@pytest.mark.parametrize("key", [0, -1, 2**63, 2**64 - 1, -(2**63), "w", "k" * 1024, "gewicht-ä", "重み"])
def test_keys(key: Any) -> None:
    assert check_key(key) == key


@pytest.mark.parametrize(
    "key", [2**64, -(2**63) - 1, "", "k" * 1025, True, 1.0, None, b"w", ("w",), object(), "\ud800"]
)
def test_what_is_no_key(key: Any) -> None:
    with pytest.raises(UsageError):
        check_key(key)


@pytest.mark.parametrize("key", [2**64, -(2**63) - 1])
def test_an_int_that_is_no_key_is_told_what_is(key: int) -> None:
    with pytest.raises(UsageError, match=rf"key {key} is out of range: .* from -2\*\*63 to 2\*\*64 - 1; pass str"):
        check_key(key)


def test_require_same_says_who_has_what() -> None:
    known = Spec((2,), "float32")
    require_same("w", known, Spec((2,), "float32"), "this call has")
    with pytest.raises(Mismatch, match=r"key 'w' is float32\[2\], but this call has float64\[2\]"):
        require_same("w", known, Spec((2,), "float64"), "this call has")


def test_require_floats() -> None:
    require_floats([("w", Spec((2,), name)) for name in ("float16", "bfloat16", "float32", "float64")])
    with pytest.raises(Mismatch, match=r"key 7 is int64\[2\]"):
        require_floats([("w", Spec((2,), "float32")), (7, Spec((2,), "int64"))])


@pytest.mark.parametrize(
    ("count", "text"), [(0, ""), (2, "0, 1"), (8, "0, 1, 2, 3, 4, 5, 6, 7"), (10, "0, 1, 2, 3, 4, 5, 6, 7 and 2 more")]
)
def test_many_keys_are_shortened(count: int, text: str) -> None:
    assert shorten(range(count)) == text


@pytest.mark.parametrize(
    ("key", "known", "advice"),
    [
        ("wieght", ["bias", "weight"], "did you mean 'weight'? A new key needs init first"),
        ("fc.2.weight", ["fc.1.weight", "fc.1.bias"], "did you mean 'fc.1.weight'? A new key needs init first"),
        ("wieght", ["bias"], "call init first"),
        ("wieght", [], "call init first"),
        ("wieght", [*map(str, range(2_000)), "weight"], "call init first"),
        (12, [1, 2, 112], "call init first"),
    ],
    ids=["misspelled", "another layer", "unlike", "none", "among too many", "int"],
)
def test_a_key_without_a_value(key: Key, known: list[Key], advice: str) -> None:
    assert str(without_value(key, known)) == f"key {key!r} has no value; {advice}"
    assert str(without_value(key, known, " here")) == f"key {key!r} has no value here; {advice}"


def test_specs_that_look_alike_are_told_apart() -> None:
    one, other = (TableSpec.of(Table(shape=(10, 3), scale=scale)) for scale in (1.0, 2.0))
    with pytest.raises(Mismatch, match=r"'t' is TableSpec.*scale=1\.0.* but this call has TableSpec.*scale=2\.0"):
        require_same("t", one, other, "this call has")


def test_numbers_are_compared_within_a_lineage_only() -> None:
    assert Version(7, 5).since(Version(7, 3)) == 2
    assert Version(7, 5).since(Version(7, 5)) == 0
    assert Version(7, 5).since(Version(7, 6)) is None
    assert Version(7, 5).since(Version(8, 3)) is None
    assert Version(UNKNOWN, 5).since(Version(UNKNOWN, 3)) is None
    assert Version(7, 5).since(NOWHERE) is None


def test_each_lineage_is_another_and_what_follows_is_known_from_it() -> None:
    drawn = {new_lineage() for _ in range(100)}
    assert len(drawn) == 100
    assert UNKNOWN not in drawn
    first = drawn.pop()
    assert next_lineage(first) == next_lineage(first) not in drawn | {first}
    assert next_lineage(UNKNOWN) == UNKNOWN
