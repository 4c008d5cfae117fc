"""The stores of a server: a standby has the same ones, and refuses what cannot be."""

from __future__ import annotations

from typing import Any

import pytest
from asking import Desk, floats, sender, text_of, updating
from asking_rows import evict, init_tables, put_rows, with_tables
from pairs import Pair, state

from kvstore import wire
from kvstore.table import Table
from servers.activity import Waits


def test_a_store_that_all_have_closed_is_gone_at_the_standby_too():
    pair = Pair(2, values={1: floats(1)})
    for worker in pair.workers:
        pair.ask(worker, wire.Close(worker.me(), 0))
        pair.catch_up()
        assert state(pair.standby) == state(pair.shard)
    assert pair.standby.stores == {}


def test_what_follows_from_no_state_is_refused():
    pair = Pair(1, values={1: floats(1)})
    pair.catch_up()
    for message, why in [
        (wire.ReadBy(9, [1], [0]), "not open"),
        (wire.Stop(), "no change"),
        (wire.Grouped(0, [1, 2], [2]), "not all here"),
        (wire.Grouped(0, [1], [2]), "cannot be"),
        (wire.Close(sender(), 0), ""),
        (wire.OptimizerCalls(0, [1], [], None, None, [], wire.encode(wire.Close(sender(), 0))), "among the calls"),
    ]:
        if why:
            with pytest.raises(ValueError, match=why):
                pair.standby.apply(message)


def push_at(desk: Desk, now: float, worker: int) -> None:
    desk.shard.times.now = now
    asker = desk.workers[worker]
    desk.ask(asker, asker.push({1: floats(1)}, 1))


def test_a_server_says_who_waits_for_whom():
    desk = Desk(3, values={1: floats(0)})
    push_at(desk, 10.0, 0)
    push_at(desk, 11.0, 2)
    waits = desk.shard.activity(14.0).waits
    assert waits == ([0, 2], [1], 4.0, "waits for worker 1, whose push 1 of 'k1' is missing")
    push_at(desk, 15.0, 1)
    assert desk.shard.activity(16.0).waits == Waits()


def test_of_a_request_for_very_many_keys_some_are_looked_at():
    desk = Desk(2, values={number: floats(0) for number in range(1, 1001)})
    one, other = desk.workers
    desk.ask(one, one.push({number: floats(1) for number in range(1, 1001)}, 1))
    desk.ask(other, other.push({number: floats(1) for number in range(1, 501)}, 1))
    waits = desk.shard.activity(1.0).waits
    assert (waits.waiting, waits.missing) == ([0], [1]), "the other's half of the keys is done"
    assert "worker 1, whose push 1 of" in waits.why


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_what_a_server_holds_and_has_done(mode: str):
    desk = Desk(2, mode, values={1: floats(0, 0), 2: floats(0)}) if mode == "sync" else updating(2)
    for clock in (1, 2, 3):
        for worker in desk.workers:
            desk.ask(worker, worker.push({1: floats(1, 1) if mode == "sync" else floats(1)}, clock))
    activity = desk.shard.activity(1.0)
    assert activity.rounds == (3 if mode == "sync" else 6)
    assert activity.held == (12 if mode == "sync" else 4 * desk.segment(1).spec.size)


@pytest.mark.parametrize(
    "make",
    [lambda w: init_tables(w, {8: Table(dim=2)}), lambda w: put_rows(w, 7, {1: (1, 1)}), lambda w: evict(w, 7)],
)
def test_what_changes_a_whole_table_is_worker_zeros(make: Any):
    desk = with_tables(2)
    b = desk.workers[1]
    message = make(b)
    said = f"only worker 0 may send {type(message).__name__}, and worker 1 did"
    assert text_of(desk.reply(b, message), "UsageError") == said


def test_requests_about_tables_need_an_open_store():
    desk = with_tables(1)
    (a,) = desk.workers
    message = evict(a, 7)
    closed = type(message)(**{**vars(message), "store": 5})
    assert "store 5 is not open" in text_of(desk.reply(a, closed), "UsageError")


def test_a_store_serves_until_the_last_worker_has_closed_it():
    desk = Desk(2, values={1: floats(3)})
    a, b = desk.workers
    assert desk.reply(b, wire.Close(b.me(), 0)) == wire.Ack(b.seq)
    assert desk.value(1).tolist() == [3]
    assert desk.reply(a, wire.Close(a.me(), 0)) == wire.Ack(a.seq)
    assert "store 0 is not open" in text_of(desk.reply(a, a.pull([1])), "UsageError")
