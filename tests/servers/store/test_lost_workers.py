"""Workers that die while the job goes on: what counts of their pushes, and what those that live are answered."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from asking import Desk, Door, Worker, floats, optimized, read, text_of, updating
from asking_rows import init_tables, push_rows
from hypothesis import given
from hypothesis import strategies as st
from pairs import Pair, state

from kvstore import wire
from kvstore.table import Table
from servers.shard import Shard
from servers.store.rounds import Rounds, WorkerClocks

# ---- rounds


def closed(rounds: Rounds[Any]) -> list[list[Any]]:
    return list(iter(rounds.complete, None))


def test_what_has_come_of_it_counts_and_nobody_waits_for_more() -> None:
    rounds: Rounds[str] = Rounds(range(3))
    rounds.contribute([2], 1, "lost")
    rounds.contribute([0], 1, "zero")
    rounds.contribute([0], 2, "zero")
    assert closed(rounds) == []
    rounds.lose([2])
    assert rounds.missing(3) == {0: 3, 1: 1}
    assert closed(rounds) == [], "it has contributed to round 1, which still lacks worker 1"
    rounds.contribute([1], 1, "one")
    assert closed(rounds) == [["zero", "one", "lost"]]
    rounds.contribute([1], 2, "one")
    assert closed(rounds) == [["zero", "one"]]


def test_rounds_that_lacked_it_alone_are_over_at_once() -> None:
    rounds: Rounds[str] = Rounds(range(3))
    for rank, clock in itertools.product((0, 1), (1, 2, 3)):
        rounds.contribute([rank], clock, f"{rank}")
    rounds.contribute([2], 1, "2")
    assert closed(rounds) == [["0", "1", "2"]]
    rounds.lose([2])
    assert closed(rounds) == [["0", "1"]] * 2
    assert rounds.missing(4) == {0: 4, 1: 4}


def test_sums_are_as_if_all_had_contributed_and_only_then() -> None:
    rounds: Rounds[str] = Rounds(range(4))
    assert (rounds.partial, rounds.factor(4)) == (False, 1.0)
    rounds.lose([])
    assert not rounds.partial
    rounds.lose([3])
    assert rounds.partial
    assert (rounds.factor(4), rounds.factor(3), rounds.factor(2)) == (1.0, 4 / 3, 2.0)


def test_a_sum_of_a_host_counts_for_all_its_workers() -> None:
    rounds: Rounds[str] = Rounds(range(4))
    rounds.contribute([2, 3], 1, "host")
    rounds.contribute([0], 1, "zero")
    rounds.lose([3])
    assert closed(rounds) == []
    rounds.contribute([1], 1, "one")
    assert closed(rounds) == [["zero", "one", "host"]]
    rounds.contribute([0, 1], 2, "host 0")
    rounds.contribute([2], 2, "two")
    assert closed(rounds) == [["host 0", "two"]]


def test_one_that_had_paused_and_is_lost_is_not_waited_for_when_all_go_on() -> None:
    rounds: Rounds[str] = Rounds(range(3))
    rounds.pause(2, 0)
    rounds.lose([2])
    for rank in (0, 1):
        rounds.contribute([rank], 1, f"{rank}")
    assert closed(rounds) == [["0", "1"]]
    for rank in (0, 1):
        rounds.pause(rank, 1)
    assert rounds.settled
    rounds.resume()
    rounds.contribute([0], 2, "0")
    assert closed(rounds) == []
    rounds.contribute([1], 2, "1")
    assert closed(rounds) == [["0", "1"]]


def test_nobody_stands_for_one_that_had_run_out_of_batches_before_it_was_lost() -> None:
    rounds: Rounds[str] = Rounds(range(3))
    rounds.pause(2, 0)
    rounds.lose([2])
    for rank in (0, 1):
        rounds.contribute((rank,), 1, f"of {rank}")
    assert rounds.complete() == ["of 0", "of 1"]
    assert rounds.factor(2) == 1.0, "it had pushed zeros, as it were"
    rounds.resume()
    for rank in (0, 1):
        rounds.contribute((rank,), 2, f"of {rank}")
    assert rounds.complete() == ["of 0", "of 1"]
    assert rounds.factor(2) == 1.5


def test_nobody_waits_for_the_last_push_of_one_that_had_paused_and_is_lost() -> None:
    rounds: Rounds[str] = Rounds(range(3))
    rounds.pause(2, 5)
    for rank in (0, 1):
        rounds.contribute([rank], 1, f"{rank}")
    rounds.lose([2])
    assert closed(rounds) == [["0", "1"]]
    for rank in (0, 1):
        rounds.pause(rank, 1)
    assert rounds.settled


def test_while_all_others_pause_its_rounds_stay_open_for_them() -> None:
    """Else servers to which its last push has not come would be a round behind when all go on."""
    rounds: Rounds[str] = Rounds(range(3))
    rounds.contribute([2], 1, "lost")
    rounds.pause(0, 0)
    rounds.lose([2])
    rounds.pause(1, 0)
    assert closed(rounds) == []
    assert rounds.settled
    rounds.resume()
    for rank in (0, 1):
        rounds.contribute([rank], 1, f"{rank}")
    assert closed(rounds) == [["0", "1", "lost"]]


def test_not_settled_before_the_last_rounds_of_those_who_live() -> None:
    rounds: Rounds[str] = Rounds(range(3))
    rounds.contribute([0], 1, "0")
    rounds.pause(0, 1)
    rounds.pause(1, 1)
    rounds.lose([2])
    assert not rounds.settled
    rounds.contribute([1], 1, "1")
    assert closed(rounds) == [["0", "1"]]
    assert rounds.settled


def test_a_quorum_is_of_those_who_live() -> None:
    rounds: Rounds[str] = Rounds(range(3), quorum=2, keep=True)
    rounds.contribute([2], 1, "lost")
    rounds.contribute([0], 1, "0")
    rounds.lose([2])
    assert closed(rounds) == [["0", "lost"]] or closed(rounds) == []
    rounds.contribute([1], 1, "1")
    assert [len(items) for items in closed(rounds)] in ([], [3])
    rounds.lose([1, 2])
    version = rounds.version
    rounds.contribute([0], version + 1, "0")
    assert len(closed(rounds)) == 1


def test_a_copy_has_lost_whom_the_original_has() -> None:
    rounds: Rounds[str] = Rounds(range(3))
    rounds.lose([1])
    made = rounds.copy()
    assert made.partial
    for rank in (0, 2):
        made.contribute([rank], 1, f"{rank}")
    assert closed(made) == [["0", "2"]]


def test_clocks_go_on_without_it_and_are_never_scaled() -> None:
    clocks: WorkerClocks[None] = WorkerClocks(range(3))
    for rank, clock in ((0, 2), (1, 1)):
        clocks.contribute([rank], clock, None)
    assert clocks.version == 0
    clocks.lose([2])
    assert clocks.version == 1
    assert clocks.missing(2) == {1: 2}
    assert (clocks.partial, clocks.factor(2)) == (False, 1.0)
    clocks.pause(0, 2)
    clocks.pause(1, 1)
    clocks.resume()
    assert clocks.missing(3) == {0: 3, 1: 3}, "nobody comes back by that"


@given(st.permutations([(rank, clock) for rank in range(3) for clock in (1, 2, 3)]), st.integers(0, 9), st.data())
def test_whenever_it_dies_each_round_has_all_who_live_and_what_had_come_of_it(order: Any, when: int, data: Any) -> None:
    victim = data.draw(st.integers(0, 2))
    rounds: Rounds[tuple[int, int]] = Rounds(range(3))
    # Each worker's pushes come in order; those of the victim until it is lost.
    clocks, completed, came = [0, 0, 0], [], set()
    for step, (rank, _) in enumerate(order):
        if step == when:
            rounds.lose([victim])
            completed += closed(rounds)
        if rank == victim and step >= when:
            continue
        clocks[rank] += 1
        came.add((rank, clocks[rank]))
        assert rounds.contribute([rank], clocks[rank], (rank, clocks[rank]))
        completed += closed(rounds)
    rounds.lose([victim])
    completed += closed(rounds)
    assert completed == [[(rank, clock) for rank in range(3) if (rank, clock) in came] for clock in (1, 2, 3)]


# ---- requests, told through a shard


def test_those_who_wait_are_answered_when_it_is_lost() -> None:
    desk, w0, w1, _w2 = Desk(3, values={1: floats(0, 0)}).and_workers()
    desk.ask(w0, w0.init({2: torch.zeros(1, dtype=torch.int64)}))
    both = [w.push({1: floats(2, 4)}, want=True) for w in (w0, w1)]
    whole = [w.push({2: torch.ones(1, dtype=torch.int64)}, want=True) for w in (w0, w1)]
    for worker, push in zip((w0, w1, w0, w1), (*both, *whole), strict=True):
        assert desk.reply(worker, push) is None
    replies = desk.named(desk.shard.depart([], {2: 1}))
    assert set(replies) == {(0, both[0].seq), (1, both[1].seq), (0, whole[0].seq), (1, whole[1].seq)}
    assert desk.value(1, 1).tolist() == [6, 12], "two of three: as if all had contributed"
    assert desk.value(2, 1).tolist() == [2], "integers are not scaled"


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_workers_repeat_what_a_lost_aggregator_had_brought_and_it_counts_once(mode: str) -> None:
    desk = Desk(3, mode, values={1: floats(0)}, aggregated=[[1, 2]], min_workers=1)
    if mode == "async":
        optimized(desk, lr=1.0)
    w0, w1, w2 = desk.workers
    (host,) = desk.aggregators
    desk.ask(host, host.push({1: floats(5)}, ranks=[1, 2] if mode == "sync" else [1]))
    desk.ask(w0, w0.push({1: floats(2)}))
    desk.ask(w0, wire.Here(w0.node, bypassed=0))  # which is not for it to say: it is of another host
    heard = desk.reply(host, host.push({1: floats(5)}, clock=2, ranks=[1, 2] if mode == "sync" else [2]))
    assert not isinstance(heard, wire.Failure)
    held = desk.value(1).tolist()
    assert desk.ask(w1, wire.Here(w1.node, bypassed=0)) == {}, "it may know before this server"
    text_of(desk.reply(host, host.push({1: floats(5)}, clock=3, ranks=[1])), "NodeLost")
    repeat = w1.push({1: floats(5)}, clock=1, want=True)
    assert read(desk, desk.reply(w1, repeat)).tolist() == desk.value(1).tolist() == held
    if mode == "sync":
        for worker, own in ((w0, 1), (w1, 10), (w2, 100)):
            desk.ask(worker, worker.push({1: floats(own)}, clock=2))
        assert desk.value(1, 2).tolist() == [111], "what the aggregator had brought to the open round is not in it"


def test_what_had_come_of_it_counts_once_on_the_server_that_has_it() -> None:
    desk, w0, w1, w2 = Desk(3, values={1: floats(0), 2: floats(0)}).and_workers()
    desk.ask(w2, w2.push({1: floats(30)}))
    desk.shard.depart([], {2: 1})
    for worker in (w0, w1):
        desk.ask(worker, worker.push({1: floats(1), 2: floats(1)}))
    assert (desk.value(1, 1).tolist(), desk.value(2, 1).tolist()) == ([32], [3])


def test_what_comes_of_it_from_then_on_is_refused_and_its_links_are_ended() -> None:
    door = Door()
    desk = Desk(2, values={1: floats(0)})
    desk.shard = Shard(0, 2, admission=door)
    w0, w1 = desk.workers
    for worker in (w0, w1):
        desk.ask(worker, worker.open())
    desk.ask(w0, w0.init({1: floats(0)}))
    push = w1.push({1: floats(5)})
    desk.shard.depart([], {1: 1})
    assert door.refused == [w1.peer]
    (reply,) = desk.ask(w1, push).values()
    assert text_of(reply, "NodeLost") == "worker 1 was given up, and the job goes on without it"
    assert desk.shard.handle(b"another link", wire.Here(w1.node)) == []
    assert b"another link" not in door.admitted
    assert desk.reply(w0, w0.push({1: floats(1)}, want=True)) is not None
    assert desk.value(1, 1).tolist() == [2]
    stranger = Worker(7)
    ((_, reply),) = desk.shard.handle(b"x", stranger.pull([1]))
    assert "is neither a worker nor an aggregator of this job" in reply.text  # type: ignore[attr-defined]


def test_a_read_of_an_async_store_waits_for_it_no_more() -> None:
    desk, w0, w1, _w2 = updating(3, staleness=0).and_workers()
    for worker in (w0, w1):
        push = worker.push({1: floats(1)}, want=True)
        assert desk.reply(worker, push) is None
    assert len(desk.named(desk.shard.depart([], {2: 1}))) == 2
    assert desk.value(1, 1).tolist() == [-2]


@pytest.mark.parametrize("inside", [True, False])
def test_join_ends_without_it_wherever_it_was(inside: bool) -> None:
    desk, w0, w1, w2 = Desk(3, values={1: floats(0)}).and_workers()
    if inside:
        desk.ask(w2, w2.pause({1: 0}))
    pauses = [worker.pause({1: 0}) for worker in (w0, w1)]
    desk.ask(w0, pauses[0])
    if inside:
        desk.shard.depart([], {2: 1})
        replies = desk.ask(w1, pauses[1])
    else:
        desk.ask(w1, pauses[1])
        replies = desk.named(desk.shard.depart([], {2: 1}))
    assert {key: reply.last for key, reply in replies.items()} == {(0, pauses[0].seq): 1, (1, pauses[1].seq): 1}
    for worker in (w0, w1):
        desk.ask(worker, worker.push({1: floats(2)}))
    assert desk.value(1, 1).tolist() == [6]


def test_who_is_inside_join_is_said_to_wait_for_those_who_live() -> None:
    desk, w0, _w1, _w2 = Desk(3, values={1: floats(0)}).and_workers()
    pause = w0.pause({1: 0})
    desk.ask(w0, pause)
    desk.shard.depart([], {2: 1})
    said = desk.reply(w0, w0.explain(pause.seq))
    assert (said.text, said.missing) == ("waits for worker 1 to join; inside join(): worker 0", [1])


def test_a_new_key_and_a_new_store_do_without_it_too() -> None:
    desk, w0, w1, _w2 = Desk(3, values={1: floats(0)}).and_workers()
    desk.shard.depart([], {2: 1})
    desk.ask(w0, w0.init({2: floats(0)}))
    for worker in (w0, w1):
        desk.ask(worker, worker.open(store=1))
    desk.ask(w0, w0.init({1: floats(0)}, store=1))
    for worker in (w0, w1):
        desk.ask(worker, worker.push({2: floats(2)}))
        desk.ask(worker, worker.push({1: floats(4)}, store=1))
    assert (desk.value(2, 1).tolist(), desk.value(1, 1, store=1).tolist()) == ([6], [12])


@pytest.mark.parametrize("before", [True, False])
def test_a_store_is_closed_when_all_who_live_have_closed_it(before: bool) -> None:
    desk, w0, w1, _w2 = Desk(3, values={1: floats(0)}).and_workers()
    close = [wire.Close(worker.me(), store=0) for worker in (w0, w1)]
    if before:
        desk.shard.depart([], {2: 1})
        assert 0 in desk.shard.stores, "nobody has closed it"
    for worker, each in zip((w0, w1), close, strict=True):
        desk.ask(worker, each)
    if not before:
        assert 0 in desk.shard.stores
        desk.shard.depart([], {2: 1})
    assert 0 not in desk.shard.stores


@pytest.mark.parametrize("before", [True, False])
def test_the_lowest_rank_that_lives_sets_an_optimizer_for_all(before: bool) -> None:
    desk, _, w1, w2 = Desk(3, values={1: floats(0)}).and_workers()
    first, last = w1.set_optimizer(lr=1.0), w2.set_optimizer(lr=1.0)
    assert desk.ask(w2, last) == {}
    if before:
        desk.shard.depart([], {0: 1})
        replies = desk.ask(w1, first)
    else:
        assert desk.ask(w1, first) == {}
        replies = desk.named(desk.shard.depart([], {0: 1}))
    assert replies == {(1, first.seq): wire.Ack(first.seq), (2, last.seq): wire.Ack(last.seq)}
    for worker in (w1, w2):
        desk.ask(worker, worker.push({1: floats(2)}))
    reply = desk.reply(w1, w1.pull([1], 1))
    assert read(desk, reply).tolist() == [-6]


def test_rows_are_scaled_too() -> None:
    desk = optimized(Desk(3), lr=1.0)
    w0, w1, _ = desk.workers
    desk.ask(w0, init_tables(w0, {1: Table(shape=(4, 1))}))
    rows = desk.shard.stores[0].buckets.table(1).rounds
    for worker in (w0, w1):
        desk.ask(worker, push_rows(worker, {1: {0: [2.0], 3: [2.0]}}))
    assert rows.version == 0
    desk.shard.depart([], {2: 1})
    assert rows.version == 1
    page = desk.shard.stores[0].buckets.table(1).table.freeze()
    _, values, _ = page.page(0, page.slots)
    assert set(torch.as_tensor(values).reshape(-1).tolist()) == {-6.0}
    page.thaw()


def test_rows_of_a_group_are_scaled_too() -> None:
    desk = optimized(Desk(3), lr=1.0)
    w0, w1, w2 = desk.workers
    desk.ask(w0, init_tables(w0, {1: Table(shape=(4, 4)), 2: Table(shape=(4, 4))}))
    rows = {number: {0: [2.0] * 4, 3: [2.0] * 4} for number in (1, 2)}
    for clock in (1, 2):
        for worker in (w0, w1, w2):
            desk.ask(worker, push_rows(worker, rows, clock))
    assert desk.shard.stores[0].buckets.groups.find([1, 2]) is not None
    desk.shard.depart([], {2: 1})
    for worker in (w0, w1):
        desk.ask(worker, push_rows(worker, rows, 3))
    for number in (1, 2):
        page = desk.shard.stores[0].buckets.table(number).table.freeze()
        _, values, _ = page.page(0, page.slots)
        assert set(torch.as_tensor(values).reshape(-1).tolist()) == {-18.0}
        page.thaw()


# ---- standbys


def test_one_that_is_made_after_a_loss_knows_of_it() -> None:
    desk, w0, w1, w2 = Desk(3, values={1: floats(0)}).and_workers()
    desk.shard.depart([], {2: 1})
    standby = Shard(0, 3)
    for message in list(desk.shard.capture()):
        standby.apply(wire.decode([bytearray(frame) for frame in wire.encode(message)]))
    assert state(standby) == state(desk.shard)
    desk.shard = standby
    assert "given up" in text_of(desk.reply(w2, w2.push({1: floats(1)})), "NodeLost")
    for worker in (w0, w1):
        desk.ask(worker, worker.push({1: floats(2)}))
    assert desk.value(1, 1).tolist() == [6]


def test_one_that_follows_does_what_its_primary_has_done() -> None:
    pair = optimized(Pair(3, values={1: floats(0)}), lr=1.0)
    w0, w1, w2 = pair.workers
    pair.ask(w2, w2.push({1: floats(8)}))
    pair.shard.depart([], {2: 1})
    for clock, worker in itertools.product((1, 2), (w0, w1)):
        pair.ask(worker, worker.push({1: floats(2)}, clock))
    assert pair.value(1, 2).tolist() == [-18]
    pair.require_same()
    pair.take_over()
    assert "given up" in text_of(pair.reply(w2, w2.push({1: floats(1)}, 2)), "NodeLost")
    for worker in (w0, w1):
        pair.ask(worker, worker.push({1: floats(2)}, 3))
    assert pair.value(1, 3).tolist() == [-24]
