"""Tables on a server: rounds of rows, each consistency rule, and what waits for what."""

from __future__ import annotations

from typing import Any

import pytest
from asking import Desk, floats, optimized, text_of
from asking_rows import (
    ask,
    describe,
    evict,
    freeze,
    init_tables,
    pull_rows,
    push_rows,
    put_rows,
    rows_in,
    table_rows,
    with_tables,
)

from kvstore import wire
from kvstore.table import Table

# ---- rounds


def test_a_push_without_rows_is_a_contribution_all_the_same():
    desk, a, b = optimized(with_tables(), lr=1.0).and_workers()
    mine, theirs = push_rows(a, {7: {}}), push_rows(b, {7: {3: (1, 0)}})
    assert desk.ask(a, mine) == {}
    assert desk.ask(b, theirs) == {(0, mine.seq): wire.Ack(mine.seq), (1, theirs.seq): wire.Ack(theirs.seq)}
    assert table_rows(desk, [3], clock=1) == [[-1, 0]]


def test_tables_and_arrays_have_rounds_of_their_own_in_one_store():
    desk, a = with_tables(1).and_workers()
    ask(desk, a.init({1: floats(0, 0)}))
    optimized(desk, lr=1.0)
    desk.reply(a, a.push({1: floats(1, 2)}))
    desk.reply(a, push_rows(a, {7: {0: (1, 1)}}))
    assert desk.value(1, clock=1).tolist() == [-1, -2]
    assert table_rows(desk, [0], clock=1) == [[-1, -1]]


def test_tables_of_one_message_may_be_at_different_rounds():
    desk, a = optimized(with_tables(1, tables={7: Table(shape=(4, 2)), 8: Table(dim=2)}), lr=1.0).and_workers()
    desk.reply(a, push_rows(a, {8: {2**40: (1, 1)}}, wide=True))
    reply = desk.reply(
        a, push_rows(a, {7: {3: (1, 1)}, 8: {2**40: (1, 1)}}, [1, 2], {7: [3], 8: [5, 2**40]}, wide=True)
    )
    assert rows_in(reply) == [[[-1, -1]], [[0, 0], [-2, -2]]]


def test_a_pull_waits_for_its_round_and_says_for_whom():
    desk, a, b = with_tables().and_workers()
    desk.ask(a, push_rows(a, {7: {1: (1, 1)}}))
    pull = pull_rows(a, {7: [1]}, clock=1)
    assert desk.ask(a, pull) == {}
    asked = a.explain(pull.seq)
    assert "worker 1, whose push 1 of 't7' is missing" in desk.reply(a, asked).text
    replies = desk.ask(b, push_rows(b, {7: {}}))
    assert rows_in(replies[0, pull.seq]) == [[[1, 1]]]


def test_a_priority_comes_back():
    desk, a = with_tables(1).and_workers()
    assert desk.reply(a, push_rows(a, {7: {1: (1, 0)}}, wanted={7: [1]}, priority=5)).priority == 5


# ---- other rules


def test_async_each_push_is_an_update_and_nobody_waits():
    desk, a, b = optimized(with_tables(2, "async"), lr=1.0).and_workers()
    assert rows_in(desk.reply(a, push_rows(a, {7: {1: (1, 1)}}, wanted={7: [1]}))) == [[[-1, -1]]]
    reply = desk.reply(b, push_rows(b, {7: {1: (1, 1)}}, wanted={7: [1]}))
    assert rows_in(reply) == [[[-2, -2]]]
    assert reply.ahead == 0
    assert desk.reply(b, push_rows(b, {7: {}}, 2, want=True)).ahead == 1


def test_a_worker_that_is_too_far_ahead_waits():
    desk, a, b = optimized(with_tables(2, "async", staleness=1), lr=1.0).and_workers()
    desk.reply(a, push_rows(a, {7: {1: (1, 1)}}))
    second = push_rows(a, {7: {1: (1, 1)}}, 2, {7: [1]})
    assert desk.ask(a, second) == {}
    replies = desk.ask(b, push_rows(b, {7: {1: (1, 1)}}))
    assert rows_in(replies[0, second.seq]) == [[[-3, -3]]]


@pytest.mark.parametrize(("late", "expected"), [("drop", [[-3, -3]]), ("keep", [[-6.75, -6.75]])])
def test_with_a_quorum_a_round_is_scaled_and_late_rows_are_dropped_or_kept(late: str, expected: list[list[float]]):
    desk, a, b, c = optimized(with_tables(3, quorum=2, late=late), lr=0.5).and_workers()
    for worker in (a, b):
        desk.ask(worker, push_rows(worker, {7: {1: (1, 1)}}))
    reply = desk.reply(c, push_rows(c, {7: {1: (1, 1)}}, wanted={7: [1]}))
    assert rows_in(reply) == [[[-1.5, -1.5]]]
    assert (reply.missed, reply.clocks) == (1, [1])
    for worker in (a, b):
        desk.ask(worker, push_rows(worker, {7: {1: (1, 1)}}, 2))
    # A late row counts as one of three contributions: the sum of three times 3 / 3.
    assert table_rows(desk, [1], clock=2) == (expected if late == "drop" else [[-3, -3]])


def test_a_worker_inside_join_is_in_no_later_round():
    desk, a, b = optimized(with_tables(2), lr=1.0).and_workers()
    pause = a.pause({7: 0})
    assert desk.ask(a, pause) == {}
    theirs = push_rows(b, {7: {1: (1, 1)}})
    assert desk.reply(b, theirs) == wire.Ack(theirs.seq)
    text = text_of(desk.reply(a, push_rows(a, {7: {1: (1, 1)}})), "UsageError")
    assert text == "worker 0 is inside join(), and must not push before all workers are"
    last = b.pause({7: 1})
    replies = desk.ask(b, last)
    assert [reply.clocks for reply in replies.values()] == [[1], [1]]
    for worker in (a, b):
        desk.ask(worker, push_rows(worker, {7: {1: (1, 1)}}, 2))
    assert table_rows(desk, [1], clock=2) == [[-3, -3]]


def test_a_worker_that_has_left_is_named_to_those_who_wait_for_its_rows():
    desk, a, _ = with_tables(2).and_workers()
    mine = push_rows(a, {7: {1: (1, 1)}}, wanted={7: [1]})
    desk.ask(a, mine)
    replies = desk.named(desk.shard.depart([1]))
    text = text_of(replies[0, mine.seq], "NodeLost")
    assert "worker 1 has left the job without a push of 't7'" in text


def test_with_a_quorum_rounds_do_without_a_worker_that_has_left():
    desk, a, _ = with_tables(2, quorum=2).and_workers()
    mine = push_rows(a, {7: {1: (1, 1)}}, wanted={7: [1]})
    desk.ask(a, mine)
    assert rows_in(desk.named(desk.shard.depart([1]))[0, mine.seq]) == [[[2, 2]]]


# ---- repeats


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize(
    "make",
    [
        lambda w: init_tables(w, {8: Table(dim=2)}),
        lambda w: init_tables(w, {7: Table(dim=2)}),
        lambda w: push_rows(w, {7: {1: (1, 1)}}, 2),
        lambda w: push_rows(w, {7: {1: (1, 1)}}, 2, {7: [1]}),
        lambda w: push_rows(w, {7: {1: (1, 1)}}, 9),
        lambda w: pull_rows(w, {7: [1, 2]}),
        lambda w: pull_rows(w, {7: [-1]}),
        lambda w: put_rows(w, 7, {2: (5, 5)}),
        lambda w: evict(w, 7),
        lambda w: describe(w, 7),
        lambda w: freeze(w, 7),
    ],
)
def test_a_repeat_is_answered_again_and_not_applied_again(make: Any, mode: str):
    desk, a = optimized(with_tables(1, mode), lr=1.0).and_workers()
    desk.reply(a, push_rows(a, {7: {1: (1, 1)}}))
    message = make(a)
    first = desk.reply(a, message)
    rows, counts = table_rows(desk, [1, 2]), desk.reply(a, describe(a, 7)).counts
    for _ in range(3):
        assert desk.reply(a, message) == first
    assert table_rows(desk, [1, 2]) == rows
    assert desk.reply(a, describe(a, 7)).counts == counts


def test_a_repeat_in_an_async_store_is_answered_with_the_rows_of_now_that_it_wants_itself():
    desk, a, b = optimized(with_tables(2, "async"), lr=1.0).and_workers()
    mine = push_rows(a, {7: {1: (1, 1)}}, wanted={7: [1]})
    assert rows_in(desk.reply(a, mine)) == [[[-1, -1]]]
    desk.reply(b, push_rows(b, {7: {1: (1, 1)}}))
    assert rows_in(desk.reply(a, mine)) == [[[-2, -2]]]


def test_a_repeat_of_a_push_that_waits_is_answered_once_and_counts_once():
    desk, a, b = with_tables(2).and_workers()
    mine = push_rows(a, {7: {1: (1, 1)}}, wanted={7: [1]})
    assert desk.ask(a, mine) == desk.ask(a, mine) == {}
    theirs = push_rows(b, {7: {1: (1, 1)}})
    assert desk.ask(b, theirs).keys() == {(0, mine.seq), (1, theirs.seq)}
    assert rows_in(desk.reply(a, mine)) == [[[2, 2]]]


# ---- answers, and the end of a store


def test_a_store_that_all_have_closed_has_no_tables_any_more():
    desk, a = with_tables(1).and_workers()
    desk.reply(a, wire.Close(a.me(), 0))
    assert "not open" in text_of(desk.reply(a, pull_rows(a, {7: [1]})), "UsageError")


def test_answers_hold_the_rows_of_their_round():
    desk, a = with_tables(1).and_workers()
    outbox = desk.shard.handle(a.peer, push_rows(a, {7: {1: (1, 1)}}, wanted={7: [1]}))
    ((_, reply),) = outbox
    assert isinstance(reply, wire.Rows)
    desk.reply(a, push_rows(a, {7: {1: (2, 2)}}, 2))
    assert rows_in(reply) == [[[1, 1]]]


# ---- aggregators


def test_an_aggregator_does_not_speak_of_tables():
    desk = Desk(2, aggregated=[[0, 1]])
    ask(desk, init_tables(desk.workers[0], {7: Table(dim=2)}))
    (aggregator,) = desk.aggregators
    text = text_of(desk.reply(aggregator, push_rows(aggregator, {7: {}})), "UsageError")
    assert (
        text
        == "aggregator 0 sent a PushRows; servers take Push, Pull and Explain from aggregators, the rest from workers"
    )
