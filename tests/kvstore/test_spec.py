"""Plain values: numbers, shapes, dtypes, keys, tables and rules, and how a refusal reads."""

from __future__ import annotations

import enum
import json
import math
import threading
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from interrupting import interrupted

import kvstore as kv
from kvstore.cached import cached
from kvstore.errors import Mismatch, UsageError
from kvstore.lineage import NOWHERE, UNKNOWN, Version, new_lineage, next_lineage
from kvstore.plain import integer, scalar
from kvstore.rule import MAX_STALENESS, Rule
from kvstore.spec import ITEMSIZE, Key, Spec, as_shape, check_key, require_floats, require_same, shorten, without_value
from kvstore.table import Table, TableSpec

# ---- numbers of any library as Python's own


class Level(enum.IntEnum):
    TWO = 2


TWOS = [
    *(2, 2.0, Level.TWO, Fraction(4, 2), Decimal("2.0")),
    *(np.float16(2), np.float32(2), np.longdouble(2), np.int8(2), np.uint64(2), np.array(2.0), np.array([[2]])),
    *(torch.tensor(2), torch.tensor([2.0], dtype=torch.bfloat16), torch.tensor(2.0, requires_grad=True)),
]


@pytest.mark.parametrize("value", TWOS, ids=repr)
def test_a_number_of_any_library_is_a_python_number(value: Any) -> None:
    assert scalar(value) == 2
    assert type(scalar(value)) in (int, float)
    assert float(json.dumps(scalar(value))) == 2


def test_what_is_taken_does_not_change_with_the_tensor() -> None:
    rate = torch.tensor(0.5)
    taken = scalar(rate)
    rate.fill_(0.25)
    assert taken == 0.5


@pytest.mark.parametrize("value", [np.True_, torch.tensor(True), True])
def test_a_bool_stays_one(value: Any) -> None:
    assert scalar(value) is True


@pytest.mark.parametrize(
    "value", [None, "x", [1.0], (2,), np.ones(2), torch.ones(2, 1), torch.ones(0), torch.ones((), device="meta"), 1j]
)
def test_what_is_no_number_stays_what_it_is(value: Any) -> None:
    assert scalar(value) is value


def test_what_has_no_value_as_a_float_is_left_to_the_callers_check() -> None:
    assert scalar(Decimal("Infinity")) == math.inf
    assert scalar(Fraction(10**400)) == Fraction(10**400)


@pytest.mark.parametrize("value", [0, 4, 1.0, "2", None, True, np.ones(2), torch.tensor(2.0)])
def test_an_integer_is_one_and_in_range(value: Any) -> None:
    assert integer("rounds", torch.tensor(3), 1, 3) == 3
    with pytest.raises(UsageError, match=r"rounds=.* must be an integer from 1 to 3"):
        integer("rounds", value, 1, 3)


class Squared:
    def __init__(self, number: int) -> None:
        self.number = number
        self.times = 0

    @cached
    def square(self) -> int:
        """Its square."""
        self.times += 1
        return self.number**2


def test_it_is_computed_once_for_each_instance() -> None:
    a, b = Squared(3), Squared(4)
    assert [a.square, a.square, b.square] == [9, 9, 16]
    assert (a.times, b.times) == (1, 1)


def test_the_class_has_it_with_its_docstring() -> None:
    assert Squared.square.__doc__ == "Its square."


def elsewhere() -> list[int]:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(Squared(5).square), daemon=True)
    thread.start()
    thread.join(10)
    return found


def test_another_thread_computes_it_after_an_exception_at_any_line() -> None:
    line = 0
    while interrupted(lambda: Squared(2).square, line):
        line += 1
        assert elsewhere() == [25]
    assert line > 1


# ---- shapes, dtypes and keys: what may be stored, and how a refusal reads


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


# ---- what a table is: what there can be, how it is described to others, and what it has where


FULL = kv.Table(
    dim=(2, 3),
    dtype="float64",
    init="normal",
    scale=0.5,
    seed=7,
    admit=kv.Probability(0.25),
    evict=[kv.Unseen(10), kv.Capacity(1000, by="count")],
    codec="int8",
)


@pytest.mark.parametrize(
    "table",
    [
        FULL,
        kv.Table(shape=(10, 3)),
        kv.Table(shape=(10, 3, 2), init="uniform", scale=2),
        kv.Table(dim=4, admit=kv.MinCount(3), evict=kv.Unseen(5)),
        kv.Table(shape=(10, 3), parameter="embedding.weight"),
        kv.Table(shape=(10, 3), parameter=0),
    ],
    ids=str,
)
def test_what_is_described_comes_back(table: kv.Table) -> None:
    assert kv.Table.of(table.described) == table


def test_numbers_of_any_library_are_taken() -> None:
    table = kv.Table(
        dim=np.int64(2),
        scale=np.float32(0.5),
        seed=np.int64(3),
        admit=kv.MinCount(np.int64(3)),
        evict=[kv.Unseen(np.int32(5)), kv.Capacity(torch.tensor(7))],
    )
    plain = kv.Table(dim=2, scale=0.5, seed=3, admit=kv.MinCount(3), evict=[kv.Unseen(5), kv.Capacity(7)])
    assert (table, repr(table)) == (plain, repr(plain))
    assert json.dumps(table.described) == json.dumps(plain.described)
    assert kv.Probability(np.float32(0.5)) == kv.Probability(0.5)


def test_a_table_has_the_name_of_the_parameter_whose_rows_it_has() -> None:
    fixed = kv.Table(shape=(10, 3))
    of_parameter = kv.Table(shape=(10, 3), parameter="w")
    assert (fixed.name("t"), of_parameter.name("t")) == ("t", "w")
    assert of_parameter.alone == fixed
    assert len(fixed.described) == 9  # as older versions have it


def test_sizes_of_tables() -> None:
    assert (FULL.grows, FULL.width, FULL.row_bytes, str(FULL)) == (True, 6, 48, "a table of float64[*, 2, 3]")
    fixed = kv.Table(shape=(10, 3))
    assert (fixed.grows, fixed.width, fixed.row_bytes, str(fixed)) == (False, 3, 12, "a table of float32[10, 3]")
    assert [fixed.rows_of(stripe, 4) for stripe in range(4)] == [3, 3, 2, 2]
    assert sum(kv.Table(shape=(2, 3)).rows_of(stripe, 4) for stripe in range(4)) == 2
    assert FULL.rows_of(0, 4) == 0


@pytest.mark.parametrize("dtype", [np.float32, np.dtype("float32"), torch.float32, "float32", np.zeros(1, "f4").dtype])
def test_dtypes_of_any_library(dtype: Any) -> None:
    assert kv.Table(dim=2, dtype=dtype).dtype == "float32"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "give one of them"),
        ({"shape": (3, 2), "dim": 2}, "give one of them"),
        ({"shape": (3,)}, r"\(rows, columns\) at least, not \(3,\)"),
        ({"dim": 0}, "1 to 1048576 elements"),
        ({"dim": 2**21}, "1 to 1048576 elements"),
        ({"dim": 2, "dtype": "int32"}, "dtype int32 of a table must be bfloat16, float16, float32, float64"),
        ({"dim": 2, "init": "ones"}, "init='ones'.*constant, normal, uniform, zeros"),
        ({"dim": 2, "scale": float("inf")}, "finite number"),
        ({"dim": 2, "scale": True}, "finite number"),
        ({"dim": 2, "seed": -1}, "seed=-1"),
        ({"dim": 2, "seed": 1.5}, "seed=1.5 of a table must be an integer"),
        ({"dim": 2, "admit": 3}, "admit=3 must be MinCount"),
        ({"dim": 2, "evict": [3]}, r"evict=\[3\] must be Unseen"),
        ({"dim": 2, "evict": [kv.Unseen(1)] * 9}, "short list"),
        ({"dim": 2, "codec": "topk"}, "codec='topk'.*bf16, fp16, int8, none"),
        ({"shape": (3, 2), "admit": kv.MinCount(2)}, "keeps all its rows"),
        ({"shape": (3, 2), "evict": kv.Unseen(2)}, "keeps all its rows"),
    ],
)
def test_what_there_cannot_be(options: Any, text: str) -> None:
    with pytest.raises(kv.UsageError, match=text):
        kv.Table(**options)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: kv.MinCount(0), r"MinCount\(count\)=0 must be an integer from 1"),
        (lambda: kv.MinCount(2.0), "MinCount"),
        (lambda: kv.Probability(0.0), "above 0 and at most 1"),
        (lambda: kv.Probability(1.5), "above 0 and at most 1"),
        (lambda: kv.Unseen(0), "Unseen"),
        (lambda: kv.Capacity(0), "Capacity"),
        (lambda: kv.Capacity(5, by="size"), "by='size'.*age, count"),
    ],
)
def test_rules_that_there_cannot_be(make: Any, text: str) -> None:
    with pytest.raises(kv.UsageError, match=text):
        make()


def test_a_table_may_be_larger_than_any_array_of_a_worker() -> None:
    spec = TableSpec.of(kv.Table(shape=(2**40, 64)))
    assert (spec.shape, spec.dtype) == ((2**40, 64), "float32")
    with pytest.raises(kv.UsageError, match=r"2\^48"):
        TableSpec.of(kv.Table(shape=(2**47, 4)))


# ---- the rule of a store: which reads may be answered, and which rules make sense


def test_with_rounds_a_read_needs_as_many_pushes_of_all_as_its_worker_has_made() -> None:
    assert [Rule().needs(clock) for clock in (0, 1, 7)] == [0, 1, 7]


def test_without_rounds_a_read_needs_nobody() -> None:
    assert Rule("async").needs(1000) == 0


def test_with_a_bound_the_slowest_may_be_so_far_behind() -> None:
    assert [Rule("async", staleness=3).needs(clock) for clock in (0, 3, 4, 10)] == [0, 0, 1, 7]
    assert Rule("async", staleness=0).needs(4) == 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "both"}, "mode='both' must be one of sync, async"),
        ({"late": "never"}, "late='never' must be one of drop, keep"),
        ({"staleness": 1}, "staleness is for"),
        ({"compensation": 0.1}, "delay_compensation for"),
        ({"mode": "async", "quorum": 2}, "a quorum is for"),
        ({"mode": "async", "staleness": -1}, "staleness=-1 must be from 0"),
        ({"mode": "async", "staleness": MAX_STALENESS + 1}, f"must be from 0 to {MAX_STALENESS}"),
        ({"quorum": 0}, "quorum=0 must be at least 1"),
        ({"grace": 1.0}, "give a quorum, too"),
        ({"quorum": 1, "grace": -1.0}, "grace=-1.0 must be a finite number of seconds, at least 0"),
        ({"quorum": 1, "grace": float("inf")}, "must be a finite number of seconds"),
        ({"mode": "async", "compensation": float("inf")}, "must be a finite number"),
        ({"aggregate": "all"}, "aggregate='all' must be one of rounds, host"),
        ({"aggregate": "host"}, "rounds are always summed by host"),
        ({"mode": "async", "aggregate": "host", "compensation": 0.1}, "corrects each worker's gradient by itself"),
    ],
)
def test_rules_that_make_no_sense(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Rule(**options)


def test_a_quorum_is_at_most_all_workers() -> None:
    Rule(quorum=3).require_workers(3)
    Rule().require_workers(1)
    with pytest.raises(UsageError, match="quorum=3 is more than the 2 workers of this job"):
        Rule(quorum=3).require_workers(2)


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (Rule(), "sync"),
        (Rule(quorum=2, late="keep"), "sync, quorum 2, late keep"),
        (Rule(quorum=2, grace=0.5), "sync, quorum 2, late drop, grace 0.5 s"),
        (Rule("async", staleness=0), "async, staleness 0"),
        (Rule("async", compensation=0.5, finite=True), "async, delay compensation 0.5, finite values only"),
    ],
)
def test_a_rule_in_words(rule: Rule, words: str) -> None:
    assert str(rule) == words
