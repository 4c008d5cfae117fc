"""Tables as they were, read page by page while they change."""

from __future__ import annotations

import numpy as np
from asking import optimized, text_of
from asking_rows import (
    ask,
    freeze,
    push_rows,
    put_rows,
    read_frozen,
    table_rows,
    thaw,
    with_tables,
)

from kvstore import wire
from kvstore.table import Capacity, Table
from servers.store.served_tables import MOST


def test_a_table_is_frozen_after_its_round_and_read_while_it_changes():
    desk = with_tables(1)
    optimized(desk, lr=1.0, momentum=0.5)
    (a,) = desk.workers
    desk.reply(a, push_rows(a, {7: {1: (1, 1), 2: (2, 2)}}))
    frozen = desk.reply(a, freeze(a, 7, clock=1))
    assert isinstance(frozen, wire.Frozen)
    assert (frozen.rows, frozen.gone, frozen.at[1]) == (2, 0, 1)
    desk.reply(a, push_rows(a, {7: {1: (1, 1)}}, 2))
    page = desk.reply(a, read_frozen(a, frozen.number, state=True))
    assert isinstance(page, wire.FrozenPage)
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


def test_a_worker_keeps_its_last_few_freezes_and_nobody_elses():
    desk = with_tables(2)
    a, b = desk.workers
    others = desk.reply(b, freeze(b, 7)).number
    numbers = [desk.reply(a, freeze(a, 7)).number for _ in range(MOST + 1)]
    assert "more than 4" in text_of(desk.reply(a, read_frozen(a, numbers[0])), "UsageError")
    for number in numbers[1:]:
        assert isinstance(desk.reply(a, read_frozen(a, number)), wire.FrozenPage)
    assert isinstance(desk.reply(b, read_frozen(b, others)), wire.FrozenPage)
    text_of(desk.reply(a, read_frozen(a, others)), "UsageError")
    desk.shard.depart([1])
    text_of(desk.reply(b, read_frozen(b, others)), "UsageError")


def test_the_ids_of_rows_that_have_gone_are_read_too_and_too_long_pages_are_refused():
    desk = with_tables(1, tables={7: Table(dim=2, evict=Capacity(1)), 8: Table(shape=(1 << 20, 64))})
    optimized(desk, lr=1.0)
    (a,) = desk.workers
    desk.reply(a, push_rows(a, {7: {1: (1, 1)}}, 1))
    first = desk.reply(a, freeze(a, 7, clock=1))
    desk.reply(a, push_rows(a, {7: {2: (1, 1)}}, 2))
    frozen = desk.reply(a, freeze(a, 7, clock=2, since=first.at))
    page = desk.reply(a, read_frozen(a, frozen.number, gone=True))
    assert (frozen.gone, page.count) == (1, 1)
    assert np.frombuffer(page.buffers[0], np.int64).tolist() == [1]
    large = desk.reply(a, freeze(a, 8))
    text = text_of(desk.reply(a, read_frozen(a, large.number, 0, 1 << 20)), "UsageError")
    assert text == "a page of 1048576 rows of 't8' is too long: ask for 1016800 at most"
