"""Requests for rows: what is checked of them, and rows as answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from asking import Worker, floats, optimized, text_of
from asking_rows import (
    ask,
    pull_rows,
    push_rows,
    rows_in,
    with_tables,
)

from kvstore import wire
from kvstore.table import Table


def int32(*ids: int) -> bytes:
    return np.array(ids, np.int32).tobytes()


def of(ids: tuple[int, ...], row_bytes: int, wanted: tuple[int, ...]) -> dict[str, Any]:
    return {"buffers": [int32(*ids), bytes(row_bytes), int32(*wanted)]}


def refused(worker: Worker, **changed: Any) -> Any:
    """A push of rows 1 and 4 whose fields are ``changed``."""
    message = push_rows(worker, {7: {1: (1, 2), 4: (3, 3)}}, wanted={7: [4, 9]})
    return type(message)(**{**vars(message), **changed})


@pytest.mark.parametrize(
    ("changed", "kind", "said"),
    [
        (of((4, 1), 16, (4, 9)), "UsageError", "worker 0 pushed rows of 't7' whose ids do not rise: 1 at"),
        (of((4, 4), 16, (4, 9)), "UsageError", "4 at position 1 follows 4"),
        (of((1, 10), 16, (4, 9)), "UsageError", "pushed row 10 (position 1) of 't7', whose rows are 0 to 9"),
        (of((-1, 1), 16, (4, 9)), "UsageError", "pushed row -1 (position 0)"),
        (of((1, 4), 16, (4, 99)), "UsageError", "worker 0 asked for row 99 (position 1)"),
        (of((1, 4), 16, (9, 4)), "UsageError", "asked for rows of 't7' whose ids do not rise"),
        (of((1, 4), 32, (4, 9)), "WireError", "sent 32 bytes of rows; 2 rows of 't7' as none are 16"),
        (of((1,), 16, (4, 9)), "WireError", "worker 0 sent 4 bytes of ids; 2 are 8"),
        ({"buffers": [int32(1, 4), bytes(16)]}, "WireError", "a push of rows has 3 buffers, not 2"),
        ({"counts": [3]}, "WireError", "worker 0 sent 8 bytes of ids; 3 are 12"),
        ({"wide": True}, "WireError", "worker 0 sent 8 bytes of ids; 2 are 16"),
        ({"clocks": [3], "ids": [9]}, "KeyNotInitialized", "segment 9 has no value on this server"),
        ({"ids": [1]}, "UsageError", "key 'k1' is an array: it has no rows that are pushed or pulled by ids"),
        ({"changes": [[0, "momentum", 0.5]]}, "UsageError", "momentum cannot become 0.5"),
    ],
)  # fmt: skip
def test_a_push_that_cannot_be_right_is_refused_and_changes_nothing(changed: dict[str, Any], kind: str, said: str):
    desk = with_tables(1)
    (a,) = desk.workers
    ask(desk, a.init({1: floats(0)}))
    optimized(desk, lr=1.0)
    assert said in text_of(desk.reply(a, refused(a, **changed)), kind)
    good = refused(a)
    assert rows_in(desk.reply(a, good)) == [[[-3, -3], [0, 0]]]  # its clock is 1 still


@pytest.mark.parametrize("table", [Table(shape=(10, 2)), Table(dim=2)])
def test_a_row_of_another_servers_stripe_is_refused(table: Table):
    desk = with_tables(1, tables={7: table}, stripes=3)
    (a,) = desk.workers
    replies = [desk.reply(a, pull_rows(a, {7: [each]})) for each in range(10)]
    texts = [text_of(reply, "UsageError") for reply in replies if not isinstance(reply, wire.Rows)]
    assert 0 < len(texts) < 10
    assert all("(position 0) of 't7', which is not on this server: it has stripe 0 of 3" in text for text in texts)


def test_rows_that_are_pushed_and_wanted_are_checked_once_and_well():
    desk = with_tables(1)
    (a,) = desk.workers
    optimized(desk, lr=1.0)
    for wrong in ((4, 1), (1, 10)):
        assert text_of(desk.reply(a, refused(a, **of(wrong, 16, wrong))), "UsageError")
    message = push_rows(a, {7: {1: (1, 2), 4: (3, 3)}}, wanted={7: [1, 4]})
    assert rows_in(desk.reply(a, message)) == [[[-1, -2], [-3, -3]]]


def test_ids_of_one_table_may_begin_below_the_last_one_of_another():
    desk = with_tables(1, tables={7: Table(shape=(10, 2)), 8: Table(shape=(10, 2)), 9: Table(shape=(10, 2))})
    (a,) = desk.workers
    reply = desk.reply(a, push_rows(a, {7: {9: (1, 1)}, 8: {}, 9: {0: (2, 2)}}, wanted={7: [], 8: [3, 4], 9: [0]}))
    assert rows_in(reply) == [[], [[0, 0], [0, 0]], [[2, 2]]]
    wrong = push_rows(a, {7: {9: (1, 1)}, 8: {5: (0, 0), 4: (0, 0)}, 9: {}}, 2)
    assert "of 't8' whose ids do not rise" in text_of(desk.reply(a, wrong), "UsageError")


@pytest.mark.parametrize(("codec", "expected"), [("fp16", [[1.5, -2]]), ("bf16", [[1.5, -2]]), ("int8", [[1.5, -2]])])
def test_rows_are_encoded_both_ways(codec: str, expected: list[list[float]]):
    desk = with_tables(1)
    (a,) = desk.workers
    reply = desk.reply(a, push_rows(a, {7: {1: (1.5, -2)}}, wanted={7: [1]}, codec=codec))
    np.testing.assert_allclose(rows_in(reply, codec=codec)[0], expected, rtol=0.02)


@pytest.mark.parametrize("codec", ["none", "fp16", "int8"])
@pytest.mark.parametrize("width", [2, 4])  # rows of 16 bytes are one array for all tables
def test_nan_is_refused_before_it_counts_and_names_worker_key_row_and_position(codec: str, width: int):
    desk = with_tables(2, tables={number: Table(dim=width) for number in (7, 8)})
    a, b = desk.workers
    row = [1.0] * width
    wrong = push_rows(b, {7: {1: row}, 8: {4: row, 6: [float("nan"), *row[1:]]}}, codec=codec)
    said = "worker 1 pushed NaN in row 6 (position 1) of 't8'; nothing has been updated"
    assert text_of(desk.reply(b, wrong), "NotFinite") == said
    for worker in (a, b):  # the round is open still
        desk.ask(worker, push_rows(worker, {7: {1: row}, 8: {4: row}}))
    assert rows_in(desk.reply(a, pull_rows(a, {8: [4, 6]}, 1)), width) == [[[2.0] * width, [0.0] * width]]
