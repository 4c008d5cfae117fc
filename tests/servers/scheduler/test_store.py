"""One store: calls that wait for workers which have left, or are inside ``join``, fail and name them."""

from __future__ import annotations

from typing import Any

from asking import text_of
from rendezvous import Job, Member

from kvstore import wire


def told(member: Member, kind: str, outbox: list[tuple[Any, Any]]) -> str:
    (reply,) = [message for whom, message in outbox if whom is member]
    return text_of(reply, kind)


def waits(job: Job, member: Member, store: int = 0, number: int = 1) -> Any:
    """Let a worker come to a barrier that is not over then; return what says for whom it waits."""
    barrier = member.barrier(number, store)
    assert job.say(member, barrier) == []
    return lambda: job.reply(member, member.explain(barrier.seq)).text


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
    assert (w2, wire.Ack(last.seq)) in job.say(w2, last)


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
    assert (w2, wire.Ack(last.seq)) in job.say(w2, last)


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
