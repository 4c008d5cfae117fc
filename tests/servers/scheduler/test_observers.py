"""What observers are told, and that they change nothing."""

from __future__ import annotations

from typing import Any

import pytest
from asking import Door, sender
from rendezvous import LIMIT, Job

from kvstore import wire
from kvstore.observing.view import JobView
from servers.scheduler.core import Scheduler
from servers.scheduler.observing import LOOK_S, MOST_OBSERVERS, SILENT_S


def observe(after: int = 0, nonce: int = 7, seq: int = 1) -> wire.Observe:
    return wire.Observe(sender(-1, seq, role="observer", incarnation=nonce), after)


def ask(job: Job, message: wire.Message, peer: bytes = b"observer") -> Any:
    [(to, reply)] = job.scheduler.handle(peer, message, job.now)
    assert to == peer
    return reply


def view(job: Job, after: int = 0) -> JobView:
    observed = ask(job, observe(after))
    assert isinstance(observed, wire.Observed), observed
    return JobView.of(observed)


def test_a_job_that_has_begun_is_shown_with_its_members() -> None:
    seen = view(Job(2, 1))
    assert (seen.num_workers, seen.num_servers, seen.num_standbys, seen.num_aggregators) == (2, 1, 0, 0)
    assert [(member.name, member.state) for member in seen.of_role("worker")] == [
        ("worker 0", "ready"),
        ("worker 1", "ready"),
    ]
    assert [event.text for event in seen.events] == ["all 3 members have joined"]
    assert (seen.failure, seen.waits) == (None, "")


def test_who_has_not_joined_is_named() -> None:
    job = Job(2, 1, start=False)
    w0, _, s0 = job.everyone
    job.say(w0, w0.join())
    job.say(s0, s0.join())
    seen = view(job)
    assert seen.waits == "waits for worker 1 to join"
    assert [(member.name, member.state) for member in seen.members] == [("worker 0", "joined"), ("server 0", "joined")]


def test_observers_are_told_where_each_process_runs_and_members_are_not() -> None:
    job = Job(2, 1, replicas=1)
    lost = job.standbys[0]
    job.scheduler.handle(b"launcher", wire.Lost("standby", 0, "was killed by SIGKILL", 1, False), job.now)
    later = lost.again()
    welcomed = job.say(later, later.join())
    assert {member.name: (member.host, member.pid) for member in view(job).members} == {
        "worker 0": ("node100", 100),
        "worker 1": ("node101", 101),
        "server 0": ("node20", 20),
        "standby 0": (f"node{later.nonce}", later.nonce),
    }
    assert welcomed
    assert "node" not in repr([message for _, message in welcomed]).replace("node=", "")


def test_silence_loss_and_failure_are_shown() -> None:
    job = Job(2, 1)
    job.now += 3.0
    assert [member.silent_s for member in view(job).members] == [3.0, 3.0, 3.0]
    job.scheduler.handle(b"launcher", wire.Lost("worker", 1, "was killed by SIGKILL", 0, False), job.now)
    seen = view(job, after=1)
    assert seen.failure == "worker 1 was killed by SIGKILL"
    assert [event.text for event in seen.events] == [
        "worker 1 is lost",
        "the job has failed: worker 1 was killed by SIGKILL",
    ]
    assert {member.name: member.state for member in seen.members}["worker 1"] == "lost"


def test_those_who_wait_at_a_barrier_are_named_and_those_who_do_not_come() -> None:
    job = Job(3, 1)
    for rank in (0, 2):
        member = job.everyone[rank]
        job.say(member, wire.OpenStore(sender(rank, 2), 1))
        job.say(member, wire.Barrier(sender(rank, 3), 0, 1))
    job.now += 7.0
    seen = view(job)
    assert seen.waits == "workers 0, 2 wait at the barrier for worker 1 (has not come yet), for 7.0 s"
    assert seen.awaited == [1]


def test_observers_are_counted_and_the_silent_ones_are_not() -> None:
    job = Job(1, 1)
    for nonce in range(MOST_OBSERVERS):
        assert isinstance(ask(job, observe(nonce=nonce), b"%d" % nonce), wire.Observed)
    refused = ask(job, observe(nonce=100), b"one more")
    assert isinstance(refused, wire.Failure)
    assert f"{MOST_OBSERVERS} observers already" in refused.text
    assert ask(job, wire.Leave(sender(-1, role="observer", incarnation=3), None), b"3") == wire.Ack(1)
    assert isinstance(ask(job, observe(nonce=100), b"one more"), wire.Observed)
    job.now += SILENT_S + 1
    assert isinstance(ask(job, observe(nonce=101), b"and another"), wire.Observed)


def test_an_observer_asks_nothing_that_changes_the_job() -> None:
    job = Job(1, 1)
    me = sender(-1, role="observer")
    requests: list[wire.Message] = [
        wire.Barrier(sender(0, role="observer"), 0, 1),
        wire.OpenStore(me, 1),
        wire.Join(me, ""),
    ]
    for request in requests:
        refused = ask(job, request)
        assert isinstance(refused, wire.Failure)
        assert "observers change nothing" in refused.text
    assert ask(job, wire.Explain(me, 1)) == wire.Explanation(1, "")


KEYS = {b"observer": "observers' key", b"worker": "worker 0's key"}


@pytest.mark.parametrize(
    ("peer", "message", "why"),
    [
        (b"worker", observe(), "another key than observers have"),
        (b"observer", wire.Barrier(sender(0), 0, 1), "good for looking on alone"),
        (b"observer", wire.Locate(sender(0), "worker", [0]), "good for looking on alone"),
    ],
    ids=["another key", "another role", "a member's question"],
)
def test_the_key_decides(peer: bytes, message: wire.Message, why: str) -> None:
    scheduler = Scheduler(1, 1, LIMIT, admission=Door(KEYS), observer_key="observers' key")
    [(_, refused)] = scheduler.handle(peer, message, 0.0)
    assert isinstance(refused, wire.Failure)
    assert why in refused.text


def test_with_the_right_key_an_observer_is_answered() -> None:
    scheduler = Scheduler(1, 1, LIMIT, admission=Door(KEYS), observer_key="observers' key")
    [(_, observed)] = scheduler.handle(b"observer", observe(), 5.0)
    assert isinstance(observed, wire.Observed)
    assert (observed.at, observed.started) == (5.0, 5.0)


def test_who_looks_regularly_sees_a_failure_before_the_scheduler_ends() -> None:
    job = Job(2, 1)
    assert not job.scheduler.to_be_seen
    view(job)
    job.now += 0.5
    job.scheduler.handle(b"launcher", wire.Lost("worker", 1, "was killed by SIGKILL", 0, False), job.now)
    assert job.scheduler.to_be_seen
    job.now += 0.5
    assert view(job).failure
    assert not job.scheduler.to_be_seen


def test_who_does_not_look_any_more_is_not_waited_for() -> None:
    job = Job(2, 1)
    view(job)
    job.now += LOOK_S
    job.scheduler.handle(b"launcher", wire.Lost("worker", 1, "was killed by SIGKILL", 0, False), job.now)
    assert job.scheduler.to_be_seen
    job.scheduler.tick(job.now + LOOK_S)
    assert not job.scheduler.to_be_seen
