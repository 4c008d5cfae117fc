"""What contributions do to rows: sums, steps, hyper-parameters, and values that are not finite."""

from __future__ import annotations

from typing import Any

import numpy as np
from asking import optimized, text_of
from asking_rows import (
    ask,
    pull_rows,
    push_rows,
    put_rows,
    rows_in,
    table_rows,
    with_tables,
)

from kvstore.table import MinCount, Table


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


def test_async_needs_an_optimizer():
    desk = with_tables(1, "async")
    (a,) = desk.workers
    text = text_of(desk.reply(a, push_rows(a, {7: {1: (1, 1)}})), "UsageError")
    assert text.startswith("a push to an async store needs an optimizer")


def test_check_finite_names_key_row_position_and_worker_and_every_worker_of_the_round_is_told():
    desk = with_tables(2, finite=True)
    optimized(desk, lr=1.0)
    a, b = desk.workers
    mine = push_rows(a, {7: {1: (1, 1)}})
    desk.ask(a, mine)
    replies = desk.ask(b, push_rows(b, {7: {1: (1, 1), 3: (float("inf"), 0)}}))
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


class Broken:
    """In place of an optimizer on rows: it fails before, or after, it has changed something."""

    lazy = True
    rule, states = "broken", {}

    def step(self, *_: Any) -> None:
        raise RuntimeError("no")


def test_if_the_optimizer_fails_before_a_row_has_changed_the_round_is_over_with_an_error():
    desk = with_tables(2)
    a, b = desk.workers
    target = desk.shard.stores[0].buckets.table(7)
    target.use(Broken())  # type: ignore[arg-type]
    desk.ask(a, push_rows(a, {7: {1: (1, 1)}}))
    replies = desk.ask(b, push_rows(b, {7: {1: (1, 1)}}))
    assert [text_of(reply, "ServerError") for reply in replies.values()] == [
        "RuntimeError: no; no row of this update of 't7' has changed"
    ] * 2
    target.use(None)
    for worker in desk.workers:
        desk.ask(worker, push_rows(worker, {7: {1: (1, 1)}}, 2))
    assert table_rows(desk, [1], clock=2) == [[2, 2]]


def test_if_it_fails_in_the_middle_of_all_rows_that_table_is_not_served_any_more():
    desk = with_tables(1)
    (a,) = desk.workers
    broken = Broken()
    broken.lazy = False
    desk.shard.stores[0].buckets.table(7).use(broken)  # type: ignore[arg-type]
    replies = desk.ask(a, push_rows(a, {7: {1: (1, 1)}}))
    (text,) = [text_of(reply, "WeightsInDoubt") for reply in replies.values()]
    assert text.startswith("an update of 't7' failed in the middle, and may be half made: RuntimeError: no; no push")
    desk.shard.stores[0].buckets.table(7).use(None)
    for asked in (push_rows(a, {7: {1: (1, 1)}}, 2), pull_rows(a, {7: [1]}, 1)):
        assert text_of(desk.reply(a, asked), "WeightsInDoubt") == text
