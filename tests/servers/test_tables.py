"""Tables on a server: rounds of rows, each consistency rule, and what waits for what."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from asking import Desk, Worker, floats, optimized, text_of
from asking_rows import (
    ask,
    describe,
    evict,
    freeze,
    init_tables,
    pull_rows,
    push_rows,
    put_rows,
    read_frozen,
    rows_in,
    table_rows,
    thaw,
    with_tables,
)

from kvstore.table import Capacity, MinCount, Table
from kvstore.wire import Ack, Close, Frozen, FrozenPage, Rows, TableCounts

# ---- rounds


def test_a_round_sums_each_row_over_all_workers_and_answers_with_the_rows_that_each_wants():
    desk = with_tables()
    optimized(desk, lr=1.0)
    a, b = desk.workers
    mine = push_rows(a, {7: {1: (1, 2), 4: (3, 3)}}, wanted={7: [4, 9]})
    assert desk.ask(a, mine) == {}
    theirs = push_rows(b, {7: {4: (1, 1)}}, wanted={7: [1]})
    replies = desk.ask(b, theirs)
    assert rows_in(replies[0, mine.seq]) == [[[-4, -4], [0, 0]]]
    assert rows_in(replies[1, theirs.seq]) == [[[-1, -2]]]


def test_without_an_optimizer_the_sums_are_the_new_rows_and_other_rows_stay():
    desk = with_tables()
    a, b = desk.workers
    ask(desk, put_rows(a, 7, {1: (5, 5), 2: (6, 6)}))
    desk.ask(a, push_rows(a, {7: {1: (1, 2)}}))
    desk.ask(b, push_rows(b, {7: {1: (1, 1)}}))
    assert table_rows(desk, [1, 2], clock=1) == [[2, 3], [6, 6]]


def test_a_push_without_rows_is_a_contribution_all_the_same():
    desk = with_tables()
    optimized(desk, lr=1.0)
    a, b = desk.workers
    mine, theirs = push_rows(a, {7: {}}), push_rows(b, {7: {3: (1, 0)}})
    assert desk.ask(a, mine) == {}
    assert desk.ask(b, theirs) == {(0, mine.seq): Ack(mine.seq), (1, theirs.seq): Ack(theirs.seq)}
    assert table_rows(desk, [3], clock=1) == [[-1, 0]]


def test_bits_do_not_depend_on_the_order_of_arrival():
    def sums(order: tuple[int, ...]) -> Any:
        desk = with_tables(3)
        values = (0.1, 1e8, -1e8)
        for rank in order:
            worker = desk.workers[rank]
            desk.ask(worker, push_rows(worker, {7: {2: (values[rank], 0)}}))
        return table_rows(desk, [2], clock=1)

    assert (
        sums((0, 1, 2)) == sums((2, 1, 0)) == sums((1, 0, 2)) == [[float(np.float32(0.1) + np.float32(1e8)) - 1e8, 0]]
    )


def test_tables_and_arrays_have_rounds_of_their_own_in_one_store():
    desk = with_tables(1)
    (a,) = desk.workers
    ask(desk, a.init({1: floats(0, 0)}))
    optimized(desk, lr=1.0)
    desk.reply(a, a.push({1: floats(1, 2)}))
    desk.reply(a, push_rows(a, {7: {0: (1, 1)}}))
    assert desk.value(1, clock=1).tolist() == [-1, -2]
    assert table_rows(desk, [0], clock=1) == [[-1, -1]]


def test_tables_of_one_message_may_be_at_different_rounds():
    desk = with_tables(1, tables={7: Table(shape=(4, 2)), 8: Table(dim=2)})
    optimized(desk, lr=1.0)
    (a,) = desk.workers
    desk.reply(a, push_rows(a, {8: {2**40: (1, 1)}}, wide=True))
    reply = desk.reply(
        a, push_rows(a, {7: {3: (1, 1)}, 8: {2**40: (1, 1)}}, [1, 2], {7: [3], 8: [5, 2**40]}, wide=True)
    )
    assert rows_in(reply) == [[[-1, -1]], [[0, 0], [-2, -2]]]


def test_a_pull_waits_for_its_round_and_says_for_whom():
    desk = with_tables()
    a, b = desk.workers
    desk.ask(a, push_rows(a, {7: {1: (1, 1)}}))
    pull = pull_rows(a, {7: [1]}, clock=1)
    assert desk.ask(a, pull) == {}
    asked = a.explain(pull.seq)
    assert "worker 1, whose push 1 of 't7' is missing" in desk.reply(a, asked).text
    replies = desk.ask(b, push_rows(b, {7: {}}))
    assert rows_in(replies[0, pull.seq]) == [[[1, 1]]]


def test_union_answers_with_all_rows_that_the_round_has_changed_and_their_ids():
    desk = with_tables()
    optimized(desk, lr=1.0)
    a, b = desk.workers
    mine, theirs = push_rows(a, {7: {1: (1, 0), 5: (1, 0)}}, union=True), push_rows(b, {7: {2: (1, 0)}}, union=True)
    desk.ask(a, mine)
    replies = desk.ask(b, theirs)
    for reply in replies.values():
        assert rows_in(reply) == [[[-1, 0]] * 3]
        assert np.frombuffer(reply.buffers[1], np.int32).tolist() == [1, 2, 5]


def test_union_needs_rounds_of_all_workers():
    desk = with_tables(2, "async")
    optimized(desk, lr=1.0)
    a = desk.workers[0]
    text = text_of(desk.reply(a, push_rows(a, {7: {1: (1, 0)}}, union=True)), "UsageError")
    assert "only a store has whose rounds are of all workers: this one is async" in text


def test_a_priority_comes_back():
    desk = with_tables(1)
    (a,) = desk.workers
    assert desk.reply(a, push_rows(a, {7: {1: (1, 0)}}, wanted={7: [1]}, priority=5)).priority == 5


@pytest.mark.parametrize(("codec", "expected"), [("fp16", [[1.5, -2]]), ("bf16", [[1.5, -2]]), ("int8", [[1.5, -2]])])
def test_rows_are_encoded_both_ways(codec: str, expected: list[list[float]]):
    desk = with_tables(1)
    (a,) = desk.workers
    reply = desk.reply(a, push_rows(a, {7: {1: (1.5, -2)}}, wanted={7: [1]}, codec=codec))
    np.testing.assert_allclose(rows_in(reply, codec=codec)[0], expected, rtol=0.02)


def test_many_tables_in_a_message_have_the_bits_of_messages_of_their_own():
    described = {number: Table(dim=4, init="normal", admit=MinCount(number)) for number in (1, 2, 3)}

    def rows(together: bool) -> Any:
        desk = with_tables(2, tables=described)
        optimized(desk, "adam", lr=0.1)
        for clock in (1, 2, 3):
            for worker in desk.workers:
                ids = [worker.rank + clock, 7, 8 + worker.rank]
                gradients = {
                    number: {each: (0.1 * each, clock, -1, 3) for each in ids[:number]} for number in described
                }
                lists = [gradients] if together else [{number: rows} for number, rows in gradients.items()]
                for each in lists:
                    desk.ask(worker, push_rows(worker, each, clock))
        (a, _) = desk.workers
        return rows_in(desk.reply(a, pull_rows(a, dict.fromkeys(described, range(10)))), width=4)

    assert rows(together=True) == rows(together=False)


def test_of_many_tables_in_a_message_the_one_whose_sum_is_not_finite_is_not_updated():
    desk = with_tables(1, tables={number: Table(dim=4) for number in (1, 2)}, finite=True)
    optimized(desk, lr=1.0)
    (a,) = desk.workers
    push = push_rows(a, {1: {5: (1, 1, 1, 1)}, 2: {6: (1, 1, 1, float("inf"))}})
    assert "of 't2' by worker 0" in text_of(desk.reply(a, push), "NotFinite")
    assert rows_in(desk.reply(a, pull_rows(a, {1: [5], 2: [6]}, 1)), width=4) == [[[-1] * 4], [[0] * 4]]


# ---- hyper-parameters


def test_a_round_is_updated_with_the_rate_of_its_pushes():
    desk = with_tables(2)
    optimized(desk, lr=1.0)
    for worker in desk.workers:
        desk.ask(worker, push_rows(worker, {7: {1: (1, 1)}}, lr=0.25, rescale=2.0))
    assert table_rows(desk, [1], clock=1) == [[-1, -1]]
    for worker in desk.workers:
        desk.ask(worker, push_rows(worker, {7: {1: (1, 1)}}, 2))
    assert table_rows(desk, [1], clock=2) == [[-3, -3]]


def test_workers_that_disagree_on_the_rate_all_get_an_error_and_the_round_is_over():
    desk = with_tables(2)
    optimized(desk, lr=1.0)
    a, b = desk.workers
    mine, theirs = push_rows(a, {7: {1: (1, 1)}}, lr=0.25), push_rows(b, {7: {1: (1, 1)}}, lr=0.5)
    desk.ask(a, mine)
    replies = desk.ask(b, theirs)
    assert [text_of(reply, "Mismatch") for reply in replies.values()] == [
        "workers disagree on the learning rate for the same round of 't7': 0.25 on worker 0, 0.5 on worker 1"
    ] * 2
    for worker in desk.workers:
        desk.ask(worker, push_rows(worker, {7: {1: (1, 1)}}, 2))
    assert table_rows(desk, [1], clock=2) == [[-2, -2]]


def test_in_async_stores_a_rate_holds_until_another_is_given():
    desk = with_tables(1, "async")
    optimized(desk, lr=1.0)
    (a,) = desk.workers
    desk.reply(a, push_rows(a, {7: {1: (1, 1)}}, lr=0.5))
    assert rows_in(desk.reply(a, push_rows(a, {7: {1: (1, 1)}}, 2, {7: [1]}))) == [[[-1, -1]]]


def test_an_optimizer_without_a_rule_for_rows_is_refused_when_there_are_tables():
    desk = with_tables(1)
    (a,) = desk.workers
    text = text_of(desk.reply(a, a.set_optimizer("rmsprop")), "UsageError")
    assert "'t7'" in text
    assert "adam" in text
    desk.reply(a, push_rows(a, {7: {1: (3, 3)}}))
    assert table_rows(desk, [1], clock=1) == [[3, 3]]  # nothing has changed


def test_a_table_is_refused_when_the_optimizer_has_no_rule_for_its_rows():
    desk = Desk(1, values={1: floats(0)})
    optimized(desk, "rmsprop")
    (a,) = desk.workers
    assert "'t7'" in text_of(desk.reply(a, init_tables(a, {7: Table(dim=2)})), "UsageError")
    assert "no value" in text_of(desk.reply(a, pull_rows(a, {7: [1]})), "KeyNotInitialized")


# ---- other rules


def test_async_each_push_is_an_update_and_nobody_waits():
    desk = with_tables(2, "async")
    optimized(desk, lr=1.0)
    a, b = desk.workers
    assert rows_in(desk.reply(a, push_rows(a, {7: {1: (1, 1)}}, wanted={7: [1]}))) == [[[-1, -1]]]
    reply = desk.reply(b, push_rows(b, {7: {1: (1, 1)}}, wanted={7: [1]}))
    assert rows_in(reply) == [[[-2, -2]]]
    assert reply.ahead == 0
    assert desk.reply(b, push_rows(b, {7: {}}, 2, want=True)).ahead == 1


def test_async_needs_an_optimizer():
    desk = with_tables(1, "async")
    (a,) = desk.workers
    text = text_of(desk.reply(a, push_rows(a, {7: {1: (1, 1)}})), "UsageError")
    assert text.startswith("a push to an async store needs an optimizer")


def test_a_worker_that_is_too_far_ahead_waits():
    desk = with_tables(2, "async", staleness=1)
    optimized(desk, lr=1.0)
    a, b = desk.workers
    desk.reply(a, push_rows(a, {7: {1: (1, 1)}}))
    second = push_rows(a, {7: {1: (1, 1)}}, 2, {7: [1]})
    assert desk.ask(a, second) == {}
    replies = desk.ask(b, push_rows(b, {7: {1: (1, 1)}}))
    assert rows_in(replies[0, second.seq]) == [[[-3, -3]]]


@pytest.mark.parametrize(("late", "expected"), [("drop", [[-3, -3]]), ("keep", [[-6.75, -6.75]])])
def test_with_a_quorum_a_round_is_scaled_and_late_rows_are_dropped_or_kept(late: str, expected: list[list[float]]):
    desk = with_tables(3, quorum=2, late=late)
    optimized(desk, lr=0.5)
    a, b, c = desk.workers
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
    desk = with_tables(2)
    optimized(desk, lr=1.0)
    a, b = desk.workers
    pause = a.pause({7: 0})
    assert desk.ask(a, pause) == {}
    theirs = push_rows(b, {7: {1: (1, 1)}})
    assert desk.reply(b, theirs) == Ack(theirs.seq)
    text = text_of(desk.reply(a, push_rows(a, {7: {1: (1, 1)}})), "UsageError")
    assert text == "worker 0 is inside join(), and must not push before all workers are"
    last = b.pause({7: 1})
    replies = desk.ask(b, last)
    assert [reply.clocks for reply in replies.values()] == [[1], [1]]
    for worker in (a, b):
        desk.ask(worker, push_rows(worker, {7: {1: (1, 1)}}, 2))
    assert table_rows(desk, [1], clock=2) == [[-3, -3]]


def test_a_worker_that_has_left_is_named_to_those_who_wait_for_its_rows():
    desk = with_tables(2)
    a, _ = desk.workers
    mine = push_rows(a, {7: {1: (1, 1)}}, wanted={7: [1]})
    desk.ask(a, mine)
    replies = desk.named(desk.shard.depart([1]))
    text = text_of(replies[0, mine.seq], "NodeLost")
    assert "worker 1 has left the job without a push of 't7'" in text


def test_with_a_quorum_rounds_do_without_a_worker_that_has_left():
    desk = with_tables(2, quorum=2)
    a, _ = desk.workers
    mine = push_rows(a, {7: {1: (1, 1)}}, wanted={7: [1]})
    desk.ask(a, mine)
    assert rows_in(desk.named(desk.shard.depart([1]))[0, mine.seq]) == [[[2, 2]]]


# ---- values that are not finite


def test_check_finite_names_key_row_position_and_worker_and_every_worker_of_the_round_is_told():
    desk = with_tables(2, finite=True)
    optimized(desk, lr=1.0)
    a, b = desk.workers
    mine = push_rows(a, {7: {1: (1, 1)}})
    desk.ask(a, mine)
    replies = desk.ask(b, push_rows(b, {7: {1: (1, 1), 3: (float("nan"), 0)}}))
    assert [text_of(reply, "NotFinite") for reply in replies.values()] == [
        "push 1 of 't7' by worker 1 has NaN or infinite elements in row 3 (position 1); no row of this update has been "
        "changed"
    ] * 2
    assert table_rows(desk, [1, 3], clock=1) == [[0, 0], [0, 0]]


def test_a_sum_that_overflows_is_not_finite_either():
    desk = with_tables(2, finite=True)
    a, b = desk.workers
    desk.ask(a, push_rows(a, {7: {1: (3e38, 1)}}))
    replies = desk.ask(b, push_rows(b, {7: {1: (3e38, 1)}}))
    assert all("their sum is not in float32" in text_of(reply, "NotFinite") for reply in replies.values())


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
    desk = with_tables(1, mode)
    optimized(desk, lr=1.0)
    (a,) = desk.workers
    desk.reply(a, push_rows(a, {7: {1: (1, 1)}}))
    message = make(a)
    first = desk.reply(a, message)
    rows, counts = table_rows(desk, [1, 2]), desk.reply(a, describe(a, 7)).counts
    for _ in range(3):
        assert desk.reply(a, message) == first
    assert table_rows(desk, [1, 2]) == rows
    assert desk.reply(a, describe(a, 7)).counts == counts


def test_a_repeat_in_an_async_store_is_answered_with_the_rows_of_now_that_it_wants_itself():
    desk = with_tables(2, "async")
    optimized(desk, lr=1.0)
    a, b = desk.workers
    mine = push_rows(a, {7: {1: (1, 1)}}, wanted={7: [1]})
    assert rows_in(desk.reply(a, mine)) == [[[-1, -1]]]
    desk.reply(b, push_rows(b, {7: {1: (1, 1)}}))
    assert rows_in(desk.reply(a, mine)) == [[[-2, -2]]]


def test_a_repeat_of_a_push_that_waits_is_answered_once_and_counts_once():
    desk = with_tables(2)
    a, b = desk.workers
    mine = push_rows(a, {7: {1: (1, 1)}}, wanted={7: [1]})
    assert desk.ask(a, mine) == desk.ask(a, mine) == {}
    theirs = push_rows(b, {7: {1: (1, 1)}})
    assert desk.ask(b, theirs).keys() == {(0, mine.seq), (1, theirs.seq)}
    assert rows_in(desk.reply(a, mine)) == [[[2, 2]]]


# ---- tables that grow, and what becomes of rows


def test_rows_that_are_not_admitted_give_zeros_and_a_pull_makes_none():
    desk = with_tables(1, tables={7: Table(dim=2, init="constant", scale=0.5, admit=MinCount(2))})
    optimized(desk, lr=1.0)
    (a,) = desk.workers
    assert table_rows(desk, [5]) == [[0, 0]]
    desk.reply(a, push_rows(a, {7: {5: (1, 1)}}))
    assert table_rows(desk, [5], clock=1) == [[0, 0]]
    desk.reply(a, push_rows(a, {7: {5: (1, 1)}}, 2))
    assert table_rows(desk, [5], clock=2) == [[-0.5, -0.5]]
    counts = desk.reply(a, describe(a, 7))
    assert isinstance(counts, TableCounts)
    assert dict(zip(counts.names, counts.counts, strict=True))["rows"] == 1


def test_evict_waits_for_its_round():
    desk = with_tables(2, tables={7: Table(dim=2, evict=Capacity(1))})
    optimized(desk, lr=1.0)
    a, b = desk.workers
    desk.ask(a, push_rows(a, {7: {5: (1, 1)}}))
    due = evict(a, 7, clock=1)
    assert desk.ask(a, due) == {}
    assert desk.ask(b, push_rows(b, {7: {6: (1, 1)}}))[0, due.seq] == Ack(due.seq)
    assert text_of(desk.reply(b, evict(b, 7)), "UsageError") == "only worker 0 may send EvictRows, and worker 1 did"


def test_a_table_is_frozen_after_its_round_and_read_while_it_changes():
    desk = with_tables(1)
    optimized(desk, lr=1.0, momentum=0.5)
    (a,) = desk.workers
    desk.reply(a, push_rows(a, {7: {1: (1, 1), 2: (2, 2)}}))
    frozen = desk.reply(a, freeze(a, 7, clock=1))
    assert isinstance(frozen, Frozen)
    assert (frozen.rows, frozen.gone, frozen.version) == (2, 0, 1)
    desk.reply(a, push_rows(a, {7: {1: (1, 1)}}, 2))
    page = desk.reply(a, read_frozen(a, frozen.number, state=True))
    assert isinstance(page, FrozenPage)
    assert page.count == 2
    assert np.frombuffer(page.buffers[0], np.int64).tolist() == [1, 2]
    assert np.frombuffer(page.buffers[1], np.float32).tolist() == [-1, -1, -2, -2]
    named = dict(zip(frozen.names, zip(frozen.dtypes, page.buffers[2:], strict=True), strict=True))
    dtype, momentum = named["state.momentum_buffer"]
    assert np.frombuffer(momentum, dtype).tolist() == [1, 1, 2, 2]
    assert desk.reply(a, read_frozen(a, frozen.number, frozen.slots)).count == 0
    ask(desk, thaw(a, frozen.number))
    assert "freeze it again" in text_of(desk.reply(a, read_frozen(a, frozen.number)), "UsageError")


def test_what_a_frozen_table_gives_can_be_put_with_its_states():
    desk = with_tables(1)
    optimized(desk, lr=1.0, momentum=0.5)
    (a,) = desk.workers
    desk.reply(a, push_rows(a, {7: {1: (1, 1)}}))
    frozen = desk.reply(a, freeze(a, 7, clock=1))
    page = desk.reply(a, read_frozen(a, frozen.number, state=True))
    desk.reply(a, push_rows(a, {7: {1: (1, 1)}}, 2))
    described = {"names": frozen.names, "dtypes": frozen.dtypes, "columns": frozen.columns}
    back = put_rows(a, 7, {1: (-1, -1)}, version=1, steps=1, parts=page.buffers[2:], **described)
    ask(desk, back)
    desk.reply(a, push_rows(a, {7: {1: (0, 0)}}, 3))
    assert table_rows(desk, [1], clock=3) == [[-1.5, -1.5]]


def test_a_store_that_all_have_closed_has_no_tables_any_more():
    desk = with_tables(1)
    (a,) = desk.workers
    desk.reply(a, Close(a.me(), 0))
    assert "not open" in text_of(desk.reply(a, pull_rows(a, {7: [1]})), "UsageError")


def test_an_interrupted_init_may_come_again_until_the_table_is_used():
    desk = with_tables(1)
    (a,) = desk.workers
    ask(desk, init_tables(a, {7: Table(shape=(3, 2), init="constant", scale=2.0)}))
    assert table_rows(desk, [2]) == [[2, 2]]
    desk.reply(a, push_rows(a, {7: {1: (1, 1)}}))
    assert "'t7'" in text_of(desk.reply(a, init_tables(a, {7: Table(dim=2)})), "AlreadyInitialized")


def test_answers_hold_the_rows_of_their_round():
    desk = with_tables(1)
    (a,) = desk.workers
    outbox = desk.shard.handle(a.peer, push_rows(a, {7: {1: (1, 1)}}, wanted={7: [1]}))
    ((_, reply),) = outbox
    assert isinstance(reply, Rows)
    desk.reply(a, push_rows(a, {7: {1: (2, 2)}}, 2))
    assert rows_in(reply) == [[[1, 1]]]


# ---- what is refused


def refused(worker: Worker, **changed: Any) -> Any:
    """A push of rows 1 and 4 whose fields are ``changed``."""
    message = push_rows(worker, {7: {1: (1, 2), 4: (3, 3)}}, wanted={7: [4, 9]})
    return type(message)(**{**vars(message), **changed})


def int32(*ids: int) -> bytes:
    return np.array(ids, np.int32).tobytes()


def of(ids: tuple[int, ...], row_bytes: int, wanted: tuple[int, ...]) -> dict[str, Any]:
    return {"buffers": [int32(*ids), bytes(row_bytes), int32(*wanted)]}


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
    texts = [text_of(reply, "UsageError") for reply in replies if not isinstance(reply, Rows)]
    assert 0 < len(texts) < 10
    assert all("(position 0) of 't7', which is not on this server: it has stripe 0 of 3" in text for text in texts)


def test_ids_of_one_table_may_begin_below_the_last_one_of_another():
    desk = with_tables(1, tables={7: Table(shape=(10, 2)), 8: Table(shape=(10, 2)), 9: Table(shape=(10, 2))})
    (a,) = desk.workers
    reply = desk.reply(a, push_rows(a, {7: {9: (1, 1)}, 8: {}, 9: {0: (2, 2)}}, wanted={7: [], 8: [3, 4], 9: [0]}))
    assert rows_in(reply) == [[], [[0, 0], [0, 0]], [[2, 2]]]
    wrong = push_rows(a, {7: {9: (1, 1)}, 8: {5: (0, 0), 4: (0, 0)}, 9: {}}, 2)
    assert "of 't8' whose ids do not rise" in text_of(desk.reply(a, wrong), "UsageError")


def test_arrays_and_tables_are_not_asked_for_alike():
    desk = with_tables(1)
    (a,) = desk.workers
    ask(desk, a.init({1: floats(0)}))
    said = "key 't7' is a table of float32[10, 2]: its rows are pushed and pulled by their ids"
    for message in (
        a.pull([7]),
        a.push({7: floats(1)}),
        a.push({1: floats(1), 7: floats(1)}),
        a.put_states({(7, "m"): floats(1)}),
    ):
        text_of(desk.reply(a, message), "UsageError")
    assert text_of(desk.reply(a, a.pull([7])), "UsageError") == said
    assert "already initialized" in text_of(desk.reply(a, a.init({7: floats(1)})), "AlreadyInitialized")
    assert "already initialized" in text_of(desk.reply(a, init_tables(a, {1: Table(dim=2)})), "AlreadyInitialized")
    assert "'k1' is an array" in text_of(desk.reply(a, pull_rows(a, {1: [1]})), "UsageError")


def test_a_table_cannot_be_in_a_store_with_delay_compensation():
    desk = Desk(1, "async", compensation=0.5)
    (a,) = desk.workers
    assert "delay_compensation" in text_of(desk.reply(a, init_tables(a, {7: Table(dim=2)})), "UsageError")


def test_rows_that_are_put_are_checked():
    desk = with_tables(1, stripes=2)
    (a,) = desk.workers
    assert "position 0" in text_of(desk.reply(a, put_rows(a, 7, {1: (1, 1)})), "UsageError")
    short = put_rows(a, 7, {2: (1, 1)})
    short = type(short)(**{**vars(short), "count": 2})
    assert "2 ids are 16 bytes, not 8" in text_of(desk.reply(a, short), "WireError")
    seen = {"names": ["seen"], "dtypes": ["float32"], "columns": [0], "parts": [bytes(4)]}
    said = text_of(desk.reply(a, put_rows(a, 7, {2: (1, 1)}, **seen)), "Mismatch")
    assert said == "'seen' of the rows of 't7' is 1 int64 a row here, not 1 float32"
    assert table_rows(desk, [2]) == [[0, 0]]


def test_an_aggregator_does_not_speak_of_tables():
    desk = Desk(2, aggregated=[[0, 1]])
    ask(desk, init_tables(desk.workers[0], {7: Table(dim=2)}))
    (aggregator,) = desk.aggregators
    text = text_of(desk.reply(aggregator, push_rows(aggregator, {7: {}})), "UsageError")
    assert (
        text
        == "aggregator 0 sent a PushRows; servers take Push, Pull and Explain from aggregators, the rest from workers"
    )
