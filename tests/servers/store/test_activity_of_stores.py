"""What a server says of its stores: who waits for whom, and what it holds and has done."""

from __future__ import annotations

import pytest
from asking import Desk, floats, updating

from servers.activity import Waits


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
