"""What a push contributes to which buckets."""

from __future__ import annotations

import pytest
from asking import Desk, Worker, floats

from kvstore.errors import UsageError
from kvstore.rule import Rule
from servers.store.contributions import contribute, require_mergeable, updates_of


def test_each_bucket_gets_its_part_of_the_values_and_its_clock():
    desk = Desk(1, values={1: floats(0), 2: floats(0, 0)})
    buckets = desk.shard.stores[0].buckets
    push = Worker(0).push({1: floats(1), 2: floats(2, 3)}, [1, 2], lr=0.5)
    first, second = updates_of(push, buckets.pushed(push.ids, push.clocks), Rule(), None)
    assert [update.items[0].clock for update in (first, second)] == [1, 2]
    assert [update.items[0].ranges[0].values.tolist() for update in (first, second)] == [[1], [2, 3]]
    assert first.hyper.lr == 0.5


def test_a_push_of_a_round_that_is_over_is_late_with_a_quorum_and_refused_without():
    desk = Desk(2, values={1: floats(0)}, quorum=1)
    a, b = desk.workers
    desk.ask(a, a.push({1: floats(1)}))
    (bucket,) = desk.shard.stores[0].buckets.all()
    push = b.push({1: floats(2)})
    (update,) = updates_of(push, [bucket], Rule(quorum=1), None)
    assert bucket.rounds.is_late(update.items[0].ranks, update.items[0].clock)
    desk = Desk(2, values={1: floats(0)})
    for worker in desk.workers:
        desk.ask(worker, worker.push({1: floats(1)}))
    (bucket,) = desk.shard.stores[0].buckets.all()
    with pytest.raises(UsageError, match="belongs to no open round"):
        updates_of(push, [bucket], Rule(), None)


def test_workers_that_are_summed_may_each_have_a_clock():
    desk = Desk(2, "async", values={1: floats(0)}, aggregate="host")
    push = Worker(0, role="aggregator").push({1: floats(2)}, 3, ranks=[0, 1], rank_clocks=[2, 3])
    (bucket,) = desk.shard.stores[0].buckets.all()
    contribute(push, bucket, updates_of(push, [bucket], Rule("async", aggregate="host"), None)[0].items[0])
    assert bucket.rounds.clocks == {0: 2, 1: 3}
    require_mergeable(push, Rule("async", aggregate="host"))
    with pytest.raises(UsageError, match="one clock"):
        require_mergeable(push, Rule())
