"""The stores of a job: their numbers, and what those who wait in them are told."""

from __future__ import annotations

from typing import Any

import pytest
from rendezvous import Job, Member

from kvstore import wire
from kvstore.errors import UsageError
from servers.scheduler.departures import Departures
from servers.scheduler.stores import Stores

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


def test_workers_at_the_barriers_of_two_stores_are_seen_to_wait_for_each_other():
    job = Job(2)
    w0, w1 = job.workers
    one, other = waits(job, w0, store=0), waits(job, w1, store=1)
    assert one() == "waits at the barrier for worker 1 (is at another barrier)"
    assert other() == "waits at the barrier for worker 0 (is at another barrier)"


def test_workers_at_different_barriers_of_a_store_are_seen_to_wait_for_each_other():
    job = Job(2)
    w0, w1 = job.workers
    one, other = waits(job, w0, number=1), waits(job, w1, number=2)
    assert one() == "waits at the barrier for worker 1 (is at another barrier)"
    assert other() == "waits at the barrier for worker 0 (is at another barrier)"


def test_a_worker_at_a_barrier_and_one_in_init_are_seen_to_wait_for_each_other():
    job = Job(2)
    w0, w1 = job.workers
    explained = waits(job, w0)
    early = w1.declare("a")
    job.say(w1, early)
    assert explained() == "waits at the barrier for worker 1 (is in init())"
    assert job.reply(w1, w1.explain(early.seq)).text == "waits for worker 0 to init 'a'"


def test_a_worker_inside_join_of_another_store_is_said_to_be_there():
    job = Job(2)
    w0, w1 = job.workers
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
