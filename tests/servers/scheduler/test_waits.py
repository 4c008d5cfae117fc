"""Whom those who wait are told of: exactly who is missing, and why."""

from __future__ import annotations

from typing import Any

import pytest
from asking import text_of
from rendezvous import Job, Member

from kvstore.wire import Ack


def told(member: Member, kind: str, outbox: list[tuple[Any, Any]]) -> str:
    (reply,) = [message for whom, message in outbox if whom is member]
    return text_of(reply, kind)


def waits(job: Job, member: Member, store: int = 0, number: int = 1) -> Any:
    """Let a worker come to a barrier that is not over then; return what says for whom it waits."""
    barrier = member.barrier(number, store)
    assert job.say(member, barrier) == []
    return lambda: job.reply(member, member.explain(barrier.seq)).text


# ---- errors


def test_who_came_and_left_is_not_named_even_after_the_barrier_has_failed():
    job = Job(4)
    w0, w1, w2, w3 = job.workers
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
    job = Job(4)
    w0, w1, w2, _ = job.workers
    waits(job, w0)
    waits(job, w1)
    outbox = job.say(w2, w2.pause())
    text = "worker 2 has called join(): nobody inside join() comes to a barrier until all workers have called it"
    assert {told(worker, "UsageError", outbox) for worker in (w0, w1)} == {text}


def test_both_are_named_who_has_left_and_who_is_inside_join():
    job = Job(4, farewell_s=1.0)
    w0, w1, w2, w3 = job.workers
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
    job = Job(3)
    w0, w1, w2 = job.workers
    waits(job, w0)
    for worker in (w1, w0, w2):
        job.say(worker, worker.pause())
    explained = waits(job, w1)
    assert explained() == "waits at the barrier for worker 0 (has not come yet), worker 2 (has not come yet)"
    waits(job, w0)
    assert explained() == "waits at the barrier for worker 2 (has not come yet)"
    last = w2.barrier()
    assert (w2, Ack(last.seq)) in job.say(w2, last)


def test_who_came_and_left_has_come_though_others_were_sent_away():
    job = Job(3)
    w0, w1, w2 = job.workers
    waits(job, w0)
    job.say(w0, w0.leave())
    waits(job, w1)
    text = told(w1, "UsageError", job.say(w2, w2.pause()))
    assert text.startswith("worker 2 has called join()")
    job.tick()
    job.say(w1, w1.pause())
    waits(job, w1)
    last = w2.barrier()
    assert (w2, Ack(last.seq)) in job.say(w2, last)


def test_a_worker_that_has_left_is_not_said_to_be_inside_join():
    job = Job(3, farewell_s=1.0)
    w0, w1, w2 = job.workers
    job.say(w0, w0.pause())
    job.say(w0, w0.leave())
    explained = waits(job, w1)
    early = w2.declare("a")
    assert job.say(w2, early) == []
    assert explained().startswith("waits at the barrier for worker 0 (has left the job), worker 2 (")
    outbox = job.tick(1.0)
    assert told(w1, "NodeLost", outbox) == "worker 0 has left the job without coming to the barrier"
    assert "worker 0 has left the job" in told(w2, "NodeLost", outbox)


# ---- explanations


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
