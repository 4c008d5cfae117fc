"""The checks of fields: what each lets pass, and what it says of what it does not."""

from __future__ import annotations

import gc
from typing import Annotated, Any, NamedTuple

import msgpack
import pytest

from kvstore.errors import WireError
from kvstore.spec import MAX_DIMS, MAX_ELEMENTS, MAX_KEY_CHARS
from kvstore.wire import fields as f
from kvstore.wire.fields import unpacked

SHORT = f.list_of(f.flag, 2)


@pytest.mark.parametrize(
    ("check", "value"),
    [
        (f.integer(-1, 3), -1),
        (f.integer(-1, 3), 3),
        (f.text(3), "abc"),
        (f.choice("a", "b"), "b"),
        (f.flag, False),
        (f.number, 1),
        (f.number, -0.5),
        (f.key, -7),
        (f.key, "k" * MAX_KEY_CHARS),
        (f.shape, []),
        (f.shape, [0] + [MAX_ELEMENTS] * (MAX_DIMS - 1)),
        (f.dtype, "bfloat16"),
        (f.optional(f.flag), None),
        (f.optional(f.flag), True),
        (SHORT, [True, False]),
        (f.tuple_of(f.flag, f.number), [True, 2]),
        (f.keys, []),
        (f.keys, [1, "a", -2]),
        (f.integers(1, 3), [1, 3, 3]),
        (f.integers(1, 3), []),
        (f.ids, [2, 1]),
        (f.hyperparameter, None),
        (f.hyperparameter, [0.9, None, 1]),
        (f.hyperparameter, "x" * f.MAX_HYPER_TEXT),
    ],
)
def test_what_is_right_passes(check: f.Check, value: Any) -> None:
    assert check(value) is None


@pytest.mark.parametrize(
    ("check", "value", "words"),
    [
        (f.integer(-1, 3), 4, "expected an integer from -1 to 3, got int 4"),
        (f.integer(), True, "got bool True"),
        (f.integer(), 1.0, "got float 1.0"),
        (f.text(3), "abcd", "expected a text of at most 3 characters, got str 'abcd'"),
        (f.text(3), b"a", "got bytes"),
        (f.choice("a", "b"), "c", "expected one of a, b, got str 'c'"),
        (f.flag, 1, "expected a bool, got int 1"),
        (f.number, float("nan"), "expected a finite number, got float nan"),
        (f.number, True, "got bool"),
        (f.key, "", "expected a key: an int, or a str of 1 to"),
        (f.key, "k" * (MAX_KEY_CHARS + 1), "expected a key"),
        (f.key, 1.5, "got float 1.5"),
        (f.shape, [1] * (MAX_DIMS + 1), f"a shape of at most {MAX_DIMS} dimensions"),
        (f.shape, [MAX_ELEMENTS + 1], f"a shape of at most {MAX_ELEMENTS} elements"),
        (f.shape, [-1], "a shape of at most"),
        (f.dtype, "complex64", "expected one of"),
        (f.optional(f.flag), 0, "expected a bool"),
        (SHORT, [True] * 3, "expected a list of at most 2, got list"),
        (SHORT, [True, 0], "expected a bool, got int 0"),
        (f.tuple_of(f.flag, f.number), [True], "expected a list of 2"),
        (f.tuple_of(f.flag, f.number), [1, 1], "expected a bool"),
        (f.keys, [1, True], "expected a key.*got bool True"),
        (f.keys, "k", "a list of at most"),
        (f.integers(1, 3), [1, 0], "a list of integers from 1 to 3, got list"),
        (f.integers(1, 3), [1, True], "a list of integers"),
        (f.ids, [1, 1], "expected distinct segment ids"),
        (f.ids, [2**32], "a list of integers"),
        (f.hyperparameter, "x" * (f.MAX_HYPER_TEXT + 1), "a text of at most"),
        (f.hyperparameter, [1] * (f.MAX_HYPER_LIST + 1), "a list of at most"),
        (f.hyperparameter, {}, "a finite number, got dict"),
    ],
)
def test_what_is_wrong_is_refused_and_said(check: f.Check, value: Any, words: str) -> None:
    with pytest.raises(WireError, match=words):
        check(value)


def test_of_what_may_be_huge_only_the_type_is_shown() -> None:
    assert f.shown([[1]] * 1000) == "list"
    assert f.shown("x" * 1000) == f"str {'x' * 40!r}"


class Point(NamedTuple):
    """Where, and how large."""

    x: Annotated[int, f.integer(0, 9)]
    y: Annotated[int, f.integer(0, 9)]
    size: Annotated[float, f.number]


class Line(NamedTuple):
    """From where, called what, and whether it is visible."""

    start: Annotated[Point, f.Triple(Point)]
    name: Annotated[str, f.text(3)]
    visible: Annotated[bool, f.flag]


def test_a_named_tuple_is_read_from_a_list_and_so_is_its_first_field() -> None:
    line = f.Triple(Line).read([[1, 2, 0.5], "abc", True])
    assert line == Line(Point(1, 2, 0.5), "abc", True)
    assert type(line) is Line
    assert type(line.start) is Point


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([[1, 2, 0.5], "a"], "expected a list of start, name, visible, got list"),
        ({}, "expected a list of start, name, visible, got dict"),
        ([[1, 2], "a", True], "start: expected a list of x, y, size"),
        ([[1, 10, 0.5], "a", True], "start: y: expected an integer from 0 to 9, got int 10"),
        ([[1, 2, None], "a", True], "start: size: expected a finite number"),
        ([[1, 2, 0.5], "long", True], "name: expected a text"),
        ([[1, 2, 0.5], "a", 1], "visible: expected a bool"),
    ],
)
def test_what_is_wrong_in_a_named_tuple_is_named(value: Any, words: str) -> None:
    with pytest.raises(WireError, match=words):
        f.Triple(Line).read(value)


@pytest.mark.parametrize("value", [[1, "two", [3.0, None, True], b"four"], [], [[]], list(range(1000))])
def test_a_list_comes_back(value: list[object]) -> None:
    assert unpacked(bytearray(msgpack.packb(value))) == value


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"\xc1",
        b"\x92\x01",  # a list that ends too soon
        b"\x91\x01\x02",  # more behind it
        b"\xdd\xff\xff\xff\xff",  # a list of four thousand million
        b"\xc6\xff\xff\xff\xff",  # bytes of 4 GiB
        b"\x91" * 3000 + b"\xc0",  # deep nesting
        msgpack.packb({"a": 1}),
        msgpack.packb([msgpack.ExtType(5, b"x")]),
        msgpack.packb([msgpack.Timestamp(1)]),
    ],
)
def test_anything_else_is_refused(packed: bytes) -> None:
    with pytest.raises(WireError):
        unpacked(packed)


def test_the_garbage_collector_goes_on_after_a_large_list() -> None:
    assert gc.isenabled()
    assert len(unpacked(msgpack.packb([["x"]] * 200_000))) == 200_000
    assert gc.isenabled()
