"""What a push of rows usually is, and that everything else is left to the other checks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from asking_rows import push_rows, with_tables

from kvstore.table import Table
from servers.store.rounds import Rounds
from servers.store.row_requests import all_in_stripe, usual_push, usual_push_of_group
from servers.store.row_target import RowTarget, TableGroup

FIXED, GROWING = Table(shape=(99, 4)), Table(dim=4)


def the_target(table: Table = FIXED, stripe: int = 0, stripes: int = 1) -> RowTarget:
    return RowTarget(7, "t", table, stripe, stripes, Rounds([0]))


def a_push(ids: tuple[int, ...] = (1, 5, 9), wanted: tuple[int, ...] | None = None, **changed: Any) -> Any:
    worker = with_tables(1).workers[0]
    message = push_rows(worker, {7: dict.fromkeys(ids, (1.0, 2.0, 3.0, 4.0))}, wanted={7: list(wanted or ids)})
    return type(message)(**{**vars(message), **changed})


@pytest.mark.parametrize("table", [FIXED, GROWING])
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_ids_and_rows_of_a_usual_push_are_views_of_the_message(table: Table, kind: Any):
    message = a_push()
    message = type(message)(**{**vars(message), "buffers": [kind(bytes(buffer)) for buffer in message.buffers]})
    usual = usual_push(message, the_target(table))
    assert usual is not None
    ids, rows = usual
    assert ids.dtype == np.int64
    assert ids.tolist() == [1, 5, 9]
    assert rows.tolist() == [[1, 2, 3, 4]] * 3
    assert rows.base is not None


NAN = np.full((3, 4), np.nan, np.float32).tobytes()


@pytest.mark.parametrize(
    "message",
    [
        a_push((9, 5)),
        a_push((5, 5)),
        a_push((5, 99)),
        a_push((-2, 5)),
        a_push((1, 3, 4)),
        a_push((1, 5), (1, 3)),
        a_push(want=False),
        a_push(union=True),
        a_push(codecs=["fp16"]),
        a_push(wide=True),
        a_push(counts=[2], wanted=[2]),
        a_push(buffers=[b"", b""]),
        a_push(buffers=[a_push().buffers[0], NAN, a_push().buffers[2]]),
        a_push(buffers=[a_push().buffers[0], NAN[:-16], a_push().buffers[2]]),
    ],
)
def test_what_is_unusual_or_wrong_is_left_to_the_other_checks(message: Any):
    assert usual_push(a_push((1, 5, 9)), the_target(stripe=1, stripes=2)) is not None
    assert usual_push(message, the_target(stripe=1, stripes=2)) is None


@pytest.mark.parametrize("stripes", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_the_ids_of_a_stripe_are_told_from_others(stripes: int, dtype: Any):
    for stripe in range(stripes):
        target = the_target(stripe=stripe, stripes=stripes)
        own = np.arange(stripe, 99, stripes, dtype=dtype)
        assert all_in_stripe(target, own)
        others = [each for each in range(99) if each % stripes != stripe]
        assert not any(all_in_stripe(target, np.append(own, dtype(each))) for each in others)


def the_group(table: Table = FIXED) -> TableGroup:
    return TableGroup([RowTarget(number, f"t{number}", table, 1, 2, Rounds([0])) for number in (7, 8, 9)])


def to_group(*ids: tuple[int, ...], wanted: Any = None, **changed: Any) -> Any:
    worker = with_tables(1).workers[0]
    rows = {number: dict.fromkeys(own, (1.0, 2.0, 3.0, number)) for number, own in zip((7, 8, 9), ids, strict=True)}
    own = {number: list(of) for number, of in rows.items()} if wanted is None else wanted
    message = push_rows(worker, rows, wanted=own)
    return type(message)(**{**vars(message), **changed})


IDS = np.array([1, 3, 5], np.int32).tobytes()


@pytest.mark.parametrize("wide", [False, True])
def test_a_usual_push_to_a_group_is_one_batch(wide: bool):
    worker = with_tables(1).workers[0]
    rows = {7: {1: (1, 1, 1, 1), 5: (2, 2, 2, 2)}, 8: {}, 9: {1: (3, 3, 3, 3)}}
    message = push_rows(worker, rows, wanted={number: list(own) for number, own in rows.items()}, wide=wide)
    pushed = usual_push_of_group(message, the_group())
    assert pushed is not None
    assert pushed.answer
    assert pushed.batch.ids.dtype == np.int64
    assert (pushed.batch.ids.tolist(), pushed.batch.starts) == ([1, 5, 1], [0, 2, 2, 3])
    assert pushed.batch.rows[:, 0].tolist() == [1, 2, 3]


@pytest.mark.parametrize("wanted", [{7: [3], 8: [1, 97]}, {}])
def test_a_usual_push_to_a_group_may_want_other_rows_or_none(wanted: Any):
    pushed = usual_push_of_group(to_group((1,), (1, 3), (5,), wanted=wanted), the_group())
    assert pushed is not None
    assert not pushed.answer


@pytest.mark.parametrize(
    "message",
    [
        to_group((9, 5), (1,), (1,)),
        to_group((1,), (5, 3), (1,)),
        to_group((1,), (3,), (99,)),
        to_group((1,), (-1, 3), (5,)),
        to_group((1,), (3,), (4,)),
        to_group((), (), ()),
        to_group((1,), (3,), (5,), wanted={7: [2]}),
        to_group((1,), (3,), (5,), wanted={8: [99]}),
        to_group((1,), (3,), (5,), wanted={9: [5, 3]}),
        to_group((1,), (3,), (5,), union=True),
        to_group((1,), (3,), (5,), codecs=["none", "fp16", "none"]),
        to_group((1,), (3,), (5,), wide=True),
        to_group((1,), (3,), (5,), counts=[1, 1, 2]),
        to_group((1,), (3,), (5,), buffers=[b"", b""]),
        to_group((1,), (3,), (5,), buffers=[IDS, NAN, IDS]),
        to_group((1,), (3,), (5,), buffers=[IDS, NAN[:-16], IDS]),
    ],
)
def test_what_is_unusual_or_wrong_of_a_group_is_left_to_the_other_checks(message: Any):
    assert usual_push_of_group(message, the_group()) is None
