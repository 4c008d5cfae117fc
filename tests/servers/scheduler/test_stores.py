"""The stores of a job: their numbers, and what those who wait in them are told."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from asking import sender, text_of
from rendezvous import Job, Member

from kvstore import wire
from kvstore.errors import Mismatch, UsageError
from servers.scheduler.departures import Departures
from servers.scheduler.stores import Barriers, Joins, Makers, Stores

# ---- numbers


def test_the_nth_stores_of_all_workers_are_one_whenever_they_are_made() -> None:
    stores = Stores(range(2), 1, Departures(0.0))
    assert [stores.open(ordinal) for ordinal in (1, 3, 1, 2, 3)] == [0, 1, 0, 2, 1]
    assert stores.of(1) is stores.of(1)
    assert stores.of(1) is not stores.of(2)


def test_a_number_is_used_again_when_all_workers_have_closed_its_store() -> None:
    stores = Stores(range(2), 1, Departures(0.0))
    assert (stores.open(1), stores.open(2)) == (0, 1)
    first = stores.of(0)
    stores.close(0, 0)
    stores.close(0, 0)
    assert stores.open(3) == 2, "worker 1 uses it"
    stores.close(1, 0)
    assert stores.open(4) == 0
    assert stores.of(0) is not first
    stores.close(0, 77)


def test_when_no_number_is_left_it_says_what_to_close() -> None:
    stores = Stores(range(1), 1, Departures(0.0))
    assert {stores.open(ordinal) for ordinal in range(1, wire.MAX_STORES + 1)} == set(range(wire.MAX_STORES))
    with pytest.raises(UsageError, match=rf"{wire.MAX_STORES} dist stores already.*close\(\)"):
        stores.open(wire.MAX_STORES + 1)
    assert stores.open(5) == 4


# ---- explanations


def waits(job: Job, member: Member, store: int = 0, number: int = 1) -> Any:
    """Let a worker come to a barrier that is not over then; return what says for whom it waits."""
    barrier = member.barrier(number, store)
    assert job.say(member, barrier) == []
    return lambda: job.reply(member, member.explain(barrier.seq)).text


@pytest.mark.parametrize("barriers", [({"store": 0}, {"store": 1}), ({"number": 1}, {"number": 2})], ids=str)
def test_workers_at_different_barriers_are_seen_to_wait_for_each_other(barriers: tuple[dict[str, int], ...]):
    job, w0, w1 = Job(2).and_workers()
    one, other = waits(job, w0, **barriers[0]), waits(job, w1, **barriers[1])
    assert one() == "waits at the barrier for worker 1 (is at another barrier)"
    assert other() == "waits at the barrier for worker 0 (is at another barrier)"


def test_a_worker_at_a_barrier_and_one_in_init_are_seen_to_wait_for_each_other():
    job, w0, w1 = Job(2).and_workers()
    explained = waits(job, w0)
    early = w1.declare("a")
    job.say(w1, early)
    assert explained() == "waits at the barrier for worker 1 (is in init())"
    assert job.reply(w1, w1.explain(early.seq)).text == "waits for worker 0 to init 'a'"


def test_a_worker_inside_join_of_another_store_is_said_to_be_there():
    job, w0, w1 = Job(2).and_workers()
    explained = waits(job, w0)
    job.say(w1, w1.pause(store=1))
    assert explained() == "waits at the barrier for worker 1 (is inside join())"


def test_of_many_who_are_missing_those_who_have_left_are_named_first():
    job = Job(12, farewell_s=1.0)
    job.say(job.workers[11], job.workers[11].leave())
    explained = waits(job, job.workers[0])
    names = ", ".join(f"worker {rank} (has not come yet)" for rank in range(1, 8))
    assert explained() == f"waits at the barrier for worker 11 (has left the job), {names} and 3 more"


@pytest.mark.parametrize("what", ["barrier", "declare"])
def test_a_server_is_not_told_what_the_worker_of_its_rank_waits_for(what: str):
    job = Job(2, 2)
    w1, s1 = job.workers[1], job.servers[1]
    early = w1.barrier() if what == "barrier" else w1.declare("a")
    job.say(w1, early)
    assert job.reply(s1, s1.explain(early.seq)).text == ""
    assert job.reply(w1, w1.explain(early.seq)).text != ""


def arrive(barriers: Barriers, rank: int, number: int = 1, seq: int = 1) -> set[int]:
    request = wire.Barrier(sender(rank, seq), store=0, number=number)
    released = barriers.arrive(b"peer %d" % rank, request)
    assert all(peer == b"peer %d" % request.node.rank for peer, request in released)
    return {request.node.rank for _, request in released}


def test_the_last_to_come_lets_all_go():
    barriers = Barriers(range(3))
    assert [arrive(barriers, rank) for rank in (2, 0, 1)] == [set(), set(), {0, 1, 2}]
    assert [arrive(barriers, rank, 2) for rank in (0, 1, 2)] == [set(), set(), {0, 1, 2}]


def test_coming_twice_is_coming_once_and_the_second_request_is_answered():
    barriers = Barriers(range(2))
    arrive(barriers, 0, seq=1)
    assert arrive(barriers, 0, seq=5) == set()
    released = barriers.arrive(b"", wire.Barrier(sender(1), store=0, number=1))
    assert {(request.node.rank, request.seq) for _, request in released} == {(0, 5), (1, 1)}


def test_numbers_do_not_mix():
    barriers = Barriers(range(2))
    arrive(barriers, 0, 1)
    assert arrive(barriers, 1, 2) == set()
    assert arrive(barriers, 1, 1) == {0, 1}


def ranks(waiters: list[tuple[bytes, wire.Barrier]]) -> list[int]:
    return [request.node.rank for _, request in waiters]


def test_those_who_have_not_come_are_missing_whoever_came_before():
    barriers = Barriers(range(4))
    arrive(barriers, 0, 1)
    arrive(barriers, 2, 1)
    assert barriers.missing(1, {0, 1, 2}) == {1}
    assert barriers.missing(2, {0, 1}) == {0, 1}, "nobody has come to that one"
    assert barriers.without(2) == []
    assert barriers.without(1) == [1]


def test_who_waited_at_a_barrier_that_failed_has_come_to_it():
    barriers = Barriers(range(3))
    arrive(barriers, 0)
    assert ranks(barriers.fail(1)) == [0]
    assert barriers.fail(1) == [], "an answer is given once"
    assert arrive(barriers, 2) == set()
    assert barriers.missing(1, {0, 1, 2}) == {1}
    assert ranks(barriers.fail(1)) == [2]
    assert not barriers.waits(0)


def test_who_is_sent_away_has_to_come_again_but_not_who_has_left():
    barriers = Barriers(range(4))
    for rank in (0, 1, 2):
        arrive(barriers, rank)
    assert ranks(barriers.send_away(1, left={0})) == [1, 2]
    assert barriers.missing(1, {0, 1, 2, 3}) == {1, 2, 3}
    assert [arrive(barriers, rank) for rank in (3, 1, 2)] == [set(), set(), {0, 1, 2, 3}]


def test_who_waits_is_known_with_whom_it_waits_for():
    barriers = Barriers(range(3))
    arrive(barriers, 1, seq=7)
    assert barriers.waits(1)
    assert not barriers.waits(0)
    assert barriers.awaited(1, 7) == {0, 2}
    assert barriers.awaited(1, 8) == barriers.awaited(0, 7) == set()


def test_a_worker_is_inside_until_all_have_called_as_often():
    joins = Joins(range(3))
    assert [joins.arrive(1, 1), joins.arrive(0, 1)] == [True, True]
    assert joins.inside == {0, 1}
    assert not joins.arrive(2, 1), "the last is not, and lets the others out"
    assert joins.inside == set()
    assert joins.arrive(2, 2)


def test_the_same_call_again_is_one_call():
    joins = Joins(range(2))
    joins.arrive(0, 1)
    joins.arrive(1, 1)
    assert not joins.arrive(0, 1)


def test_who_has_left_is_neither_waited_for_nor_inside():
    joins = Joins(range(3))
    joins.arrive(0, 1)
    joins.arrive(1, 1)
    joins.depart(1)
    assert joins.inside == {0}
    joins.depart(2)
    assert joins.inside == set()
    joins.depart(2)
    assert not joins.arrive(2, 1)
    assert not joins.arrive(0, 2), "nobody else is there"
    joins.depart(0)
    assert joins.inside == set()


def test_who_had_left_before_is_not_waited_for():
    joins = Joins(range(3), gone={2})
    joins.arrive(0, 1)
    assert not joins.arrive(1, 1)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_the_order_it_is_who_has_called_oftener_than_another(seed: int):
    draws, joins, calls = random.Random(seed), Joins(range(4)), dict.fromkeys(range(4), 0)
    for _ in range(40):
        rank = draws.randrange(4)
        if draws.random() < 0.05:
            joins.depart(rank)
            calls.pop(rank, None)
        elif rank in calls:
            calls[rank] += draws.randrange(3)
            joins.arrive(rank, calls[rank])
        assert joins.inside == {one for one, other in itertools.permutations(calls, 2) if calls[one] > calls[other]}


def made(rank: int, ordinal: int, place: str, what: str = "a 'dist_sync' store of kvstore.create()") -> wire.OpenStore:
    return wire.OpenStore(wire.Sender(wire.Node("worker", rank, 1), ordinal, 0), ordinal, what, place)


def test_workers_that_make_the_same_stores_in_the_same_order_are_not_disturbed() -> None:
    makers = Makers()
    for rank in (2, 0, 1):
        for ordinal, place in enumerate(["t.py:3", "t.py:9", "t.py:3", "t.py:9"], 1):
            makers.note(made(rank, ordinal, place))


def test_a_branch_for_each_worker_may_make_a_store() -> None:
    makers = Makers()
    for rank in range(3):
        makers.note(made(rank, 1, f"t.py:{10 + rank}"))
        makers.note(made(rank, 2, "t.py:20"))


@pytest.mark.parametrize("order", [[(0, 1), (0, 2), (1, 1)], [(1, 1), (0, 1), (0, 2)], [(0, 1), (1, 1), (0, 2)]])
def test_a_store_that_one_worker_makes_alone_is_named(order: list[tuple[int, int]]) -> None:
    """Worker 0 makes one in line 3, before the one that all make in line 4."""
    makers = Makers()
    places = {(0, 1): "t.py:3", (0, 2): "t.py:4", (1, 1): "t.py:4"}
    *first, last = order
    for which in first:
        makers.note(made(*which, places[which]))
    with pytest.raises(
        Mismatch, match=r"1st store of .*t\.py:\d.* 1st store of .*t\.py:\d.*in the same order"
    ) as caught:
        makers.note(made(*last, places[last]))
    assert "t.py:3" in str(caught.value)
    assert "t.py:4" in str(caught.value)


def test_another_type_or_maker_is_named_wherever_it_was_made() -> None:
    makers = Makers()
    makers.note(made(0, 1, "", "a 'dist_sync' store of kvstore.create()"))
    with pytest.raises(Mismatch, match=r"'dist_sync' store of Trainer.*'dist_sync' store of kvstore\.create\(\)"):
        makers.note(made(1, 1, "", "a 'dist_sync' store of Trainer"))


def test_a_worker_that_was_interrupted_may_make_its_store_again_elsewhere() -> None:
    makers = Makers()
    makers.note(made(0, 1, "t.py:3", "a 'dist_sync' store of Trainer"))
    makers.note(made(0, 1, "t.py:7", "a 'dist_sync' store of DistOpt"))
    makers.note(made(1, 1, "t.py:3", "a 'dist_sync' store of DistOpt"))
    makers.note(made(1, 1, "t.py:7", "a 'dist_sync' store of DistOpt"))
    for rank in range(2):
        makers.note(made(rank, 2, "t.py:3"))


def test_who_has_not_made_a_store_is_said_and_what_is_closed_is_forgotten() -> None:
    makers = Makers()
    for number in range(1, 40):
        makers.note(made(0, number, "t.py:3"))
        assert "worker 1 made no" in makers.unmade(number, [0, 1])
        makers.note(made(1, number, "t.py:3"))
        assert not makers.unmade(number, [0, 1])
        makers.forget(number)
        assert not makers.unmade(number, [0, 1])


def told(member: Member, kind: str, outbox: list[tuple[Any, Any]]) -> str:
    (reply,) = [message for whom, message in outbox if whom is member]
    return text_of(reply, kind)


def test_who_came_and_left_is_not_named_even_after_the_barrier_has_failed():
    job, w0, w1, w2, w3 = Job(4).and_workers()
    for worker in (w0, w2):
        job.say(worker, worker.barrier())
    for worker in (w0, w1):
        job.say(worker, worker.leave())
    text = "worker 1 has left the job without coming to the barrier"
    assert told(w2, "NodeLost", job.tick()) == text
    assert told(w3, "NodeLost", job.say(w3, w3.barrier())) == text


def test_all_who_have_left_without_coming_are_named():
    job = Job(12)
    for worker in job.workers[2:]:
        job.say(worker, worker.leave())
    job.tick()
    names = ", ".join(f"worker {rank}" for rank in range(2, 10)) + " and 2 more"
    assert told(job.workers[0], "NodeLost", job.say(job.workers[0], job.workers[0].barrier())) == (
        f"{names} have left the job without coming to the barrier"
    )


def test_who_is_inside_join_is_named_and_whoever_came_before_is_not():
    job, w0, w1, w2, _ = Job(4).and_workers()
    waits(job, w0)
    waits(job, w1)
    outbox = job.say(w2, w2.pause())
    text = "worker 2 has called join(): nobody inside join() comes to a barrier until all workers have called it"
    assert {told(worker, "UsageError", outbox) for worker in (w0, w1)} == {text}


def test_both_are_named_who_has_left_and_who_is_inside_join():
    job, w0, w1, w2, w3 = Job(4, farewell_s=1.0).and_workers()
    job.say(w1, w1.leave())
    job.say(w2, w2.pause())
    text = (
        "worker 1 has left the job without coming to the barrier; "
        "worker 2 has called join(): nobody inside join() comes to a barrier until all workers have called it"
    )
    assert told(w0, "UsageError", job.say(w0, w0.barrier())) == text, "the others need not know of worker 1 yet"
    job.tick(1.0)
    assert told(w3, "NodeLost", job.say(w3, w3.barrier())) == text


def test_who_was_sent_away_has_to_come_again_and_is_missing_until_then():
    job, w0, w1, w2 = Job(3).and_workers()
    waits(job, w0)
    for worker in (w1, w0, w2):
        job.say(worker, worker.pause())
    explained = waits(job, w1)
    assert explained() == "waits at the barrier for worker 0 (has not come yet), worker 2 (has not come yet)"
    waits(job, w0)
    assert explained() == "waits at the barrier for worker 2 (has not come yet)"
    last = w2.barrier()
    assert (w2, wire.Ack(last.seq)) in job.say(w2, last)


def test_who_came_and_left_has_come_though_others_were_sent_away():
    job, w0, w1, w2 = Job(3).and_workers()
    waits(job, w0)
    job.say(w0, w0.leave())
    waits(job, w1)
    text = told(w1, "UsageError", job.say(w2, w2.pause()))
    assert text.startswith("worker 2 has called join()")
    job.tick()
    job.say(w1, w1.pause())
    waits(job, w1)
    last = w2.barrier()
    assert (w2, wire.Ack(last.seq)) in job.say(w2, last)


def test_a_worker_that_has_left_is_not_said_to_be_inside_join():
    job, w0, w1, w2 = Job(3, farewell_s=1.0).and_workers()
    job.say(w0, w0.pause())
    job.say(w0, w0.leave())
    explained = waits(job, w1)
    early = w2.declare("a")
    assert job.say(w2, early) == []
    assert explained().startswith("waits at the barrier for worker 0 (has left the job), worker 2 (")
    outbox = job.tick(1.0)
    assert told(w1, "NodeLost", outbox) == "worker 0 has left the job without coming to the barrier"
    assert "worker 0 has left the job" in told(w2, "NodeLost", outbox)
