"""The tables of one store: init, loading, eviction, statistics, and what there cannot be."""

from __future__ import annotations

import numpy as np
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
    read_frozen,
    table_rows,
    thaw,
    with_tables,
)

from kvstore import wire
from kvstore.table import Capacity, MinCount, Table
from servers.store.tables import served_tables
from servers.store.tables.served_tables import MOST


def test_an_optimizer_without_a_rule_for_rows_is_refused_when_there_are_tables():
    desk, a = with_tables(1).and_workers()
    text = text_of(desk.reply(a, a.set_optimizer("rmsprop")), "UsageError")
    assert "'t7'" in text
    assert "adam" in text
    desk.reply(a, push_rows(a, {7: {1: (3, 3)}}))
    assert table_rows(desk, [1], clock=1) == [[3, 3]]  # nothing has changed


def test_a_table_is_refused_when_the_optimizer_has_no_rule_for_its_rows():
    desk, a = optimized(Desk(1, values={1: floats(0)}), "rmsprop").and_workers()
    assert "'t7'" in text_of(desk.reply(a, init_tables(a, {7: Table(dim=2)})), "UsageError")
    assert "no value" in text_of(desk.reply(a, pull_rows(a, {7: [1]})), "KeyNotInitialized")


def test_union_needs_rounds_of_all_workers():
    desk = optimized(with_tables(2, "async"), lr=1.0)
    a = desk.workers[0]
    text = text_of(desk.reply(a, push_rows(a, {7: {1: (1, 0)}}, union=True)), "UsageError")
    assert "only a store has whose rounds are of all workers: this one is async" in text


def test_rows_that_are_not_admitted_give_zeros_and_a_pull_makes_none():
    desk = optimized(with_tables(1, tables={7: Table(dim=2, init="constant", scale=0.5, admit=MinCount(2))}), lr=1.0)
    (a,) = desk.workers
    assert table_rows(desk, [5]) == [[0, 0]]
    desk.reply(a, push_rows(a, {7: {5: (1, 1)}}))
    assert table_rows(desk, [5], clock=1) == [[0, 0]]
    desk.reply(a, push_rows(a, {7: {5: (1, 1)}}, 2))
    assert table_rows(desk, [5], clock=2) == [[-0.5, -0.5]]
    counts = desk.reply(a, describe(a, 7))
    assert isinstance(counts, wire.TableCounts)
    assert dict(zip(counts.names, counts.counts, strict=True))["rows"] == 1


def test_evict_waits_for_its_round():
    desk, a, b = optimized(with_tables(2, tables={7: Table(dim=2, evict=Capacity(1))}), lr=1.0).and_workers()
    desk.ask(a, push_rows(a, {7: {5: (1, 1)}}))
    due = evict(a, 7, clock=1)
    assert desk.ask(a, due) == {}
    assert desk.ask(b, push_rows(b, {7: {6: (1, 1)}}))[0, due.seq] == wire.Ack(due.seq)
    assert text_of(desk.reply(b, evict(b, 7)), "UsageError") == "only worker 0 may send EvictRows, and worker 1 did"


def test_an_interrupted_init_may_come_again_until_the_table_is_used():
    desk, a = with_tables(1).and_workers()
    ask(desk, init_tables(a, {7: Table(shape=(3, 2), init="constant", scale=2.0)}))
    assert table_rows(desk, [2]) == [[2, 2]]
    desk.reply(a, push_rows(a, {7: {1: (1, 1)}}))
    assert "'t7'" in text_of(desk.reply(a, init_tables(a, {7: Table(dim=2)})), "AlreadyInitialized")


def test_arrays_and_tables_are_not_asked_for_alike():
    desk, a = with_tables(1).and_workers()
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
    desk, a = Desk(1, "async", compensation=0.5).and_workers()
    assert "delay_compensation" in text_of(desk.reply(a, init_tables(a, {7: Table(dim=2)})), "UsageError")


def test_rows_that_are_put_are_checked():
    desk, a = with_tables(1, stripes=2).and_workers()
    assert "position 0" in text_of(desk.reply(a, put_rows(a, 7, {1: (1, 1)})), "UsageError")
    short = put_rows(a, 7, {2: (1, 1)})
    short = type(short)(**{**vars(short), "count": 2})
    assert "2 ids are 16 bytes, not 8" in text_of(desk.reply(a, short), "WireError")
    seen = {"names": ["seen"], "dtypes": ["float32"], "columns": [0], "parts": [bytes(4)]}
    said = text_of(desk.reply(a, put_rows(a, 7, {2: (1, 1)}, **seen)), "Mismatch")
    assert said == "'seen' of the rows of 't7' is 1 int64 a row here, not 1 float32"
    assert table_rows(desk, [2]) == [[0, 0]]


def test_a_table_is_frozen_after_its_round_and_read_while_it_changes():
    desk, a = optimized(with_tables(1), lr=1.0, momentum=0.5).and_workers()
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
    desk, a = optimized(with_tables(1), lr=1.0, momentum=0.5).and_workers()
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
    desk, a, b = with_tables(2).and_workers()
    others = desk.reply(b, freeze(b, 7)).number
    numbers = [desk.reply(a, freeze(a, 7)).number for _ in range(MOST + 1)]
    assert "more than 4" in text_of(desk.reply(a, read_frozen(a, numbers[0])), "UsageError")
    for number in numbers[1:]:
        assert isinstance(desk.reply(a, read_frozen(a, number)), wire.FrozenPage)
    assert isinstance(desk.reply(b, read_frozen(b, others)), wire.FrozenPage)
    text_of(desk.reply(a, read_frozen(a, others)), "UsageError")
    desk.shard.depart([1])
    text_of(desk.reply(b, read_frozen(b, others)), "UsageError")


def test_the_ids_of_rows_that_have_gone_are_read_too_and_too_long_pages_are_refused(monkeypatch):
    monkeypatch.setattr(served_tables, "MAX_PAGE_BYTES", 40)
    desk = optimized(with_tables(1, tables={7: Table(dim=2, evict=Capacity(1)), 8: Table(shape=(1 << 20, 2))}), lr=1.0)
    (a,) = desk.workers
    desk.reply(a, push_rows(a, {7: {1: (1, 1)}}, 1))
    first = desk.reply(a, freeze(a, 7, clock=1))
    desk.reply(a, push_rows(a, {7: {2: (1, 1)}}, 2))
    frozen = desk.reply(a, freeze(a, 7, clock=2, since=first.at))
    page = desk.reply(a, read_frozen(a, frozen.number, gone=True))
    assert (frozen.gone, page.count) == (1, 1)
    assert np.frombuffer(page.buffers[0], np.int64).tolist() == [1]
    desk.reply(a, push_rows(a, {8: dict.fromkeys(range(5), (1, 1))}, 1))
    large = desk.reply(a, freeze(a, 8, clock=1))
    text = text_of(desk.reply(a, read_frozen(a, large.number, 0, 1 << 20)), "UsageError")
    assert text == "a page of 5 rows of 't8' is too long: ask for 2 at most"


def test_a_stripe_that_there_cannot_be_is_refused():
    desk, a = Desk(1).and_workers()
    text = text_of(desk.reply(a, init_tables(a, {7: Table(dim=2)}, stripe=2, stripes=2)), "UsageError")
    assert text == "stripe 2 of 2: stripes count from 0"
