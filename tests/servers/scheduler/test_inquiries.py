"""Where members are: who is asked, and what is said of those who answer, and of those who do not."""

from __future__ import annotations

from typing import Any

import pytest
from asking import Door
from rendezvous import LIMIT, Job, Member

from kvstore import wire
from kvstore.wire.guests import MOST_LOCATED, UNASKED
from servers.scheduler import inquiries
from servers.scheduler.inquiries import ANSWER_S

BESIDE = b"beside worker 1"


def ask(job: Job, asker: Member, *ranks: int, role: str = "worker") -> list[tuple[Any, Any]]:
    return job.say(asker, wire.Locate(asker.me(), role, list(ranks)))


def answer(job: Job, member: Member, number: int, place: str = "train.py:41 in load", doing: str = "") -> list[Any]:
    return job.handle(member.beats, wire.Stacks(member.node, number, place, doing, [["MainThread", [place]]]))


def time_over(job: Job) -> list[tuple[Any, Any]]:
    """What is sent because members have not answered in time."""
    job.now += ANSWER_S
    assert job.scheduler.observing.inquiries.due() <= job.now
    return job.named(job.scheduler.tick(job.now))


def the_place(outbox: list[tuple[Any, Any]]) -> str:
    ((_, reply),) = outbox
    assert isinstance(reply, wire.Located)
    assert len(reply.places) == 1
    return str(reply.places[0])


def test_a_member_is_asked_over_its_heartbeats_link_and_its_answer_is_passed_on():
    job = Job(workers=3)
    w0, w1, w2, _ = job.everyone
    assert ask(job, w0, 1, 2) == [(w1, wire.Where(1)), (w2, wire.Where(2))]
    assert answer(job, w2, 2, "train.py:7 in step", "waits for a lock (threading.py:320 in wait)") == []
    ((whom, located),) = answer(job, w1, 1)
    assert (whom, located.seq, located.ranks) == (w0, w0.seq, [1, 2])
    assert located.places == [
        "is at train.py:41 in load",
        "is at train.py:7 in step, which waits for a lock (threading.py:320 in wait)",
    ]
    assert not located.buffers, "members do not show them"
    assert job.scheduler.observing.inquiries.due() is None
    assert job.tick() == []


def test_servers_are_asked_like_workers():
    job = Job()
    w0, _, s0 = job.everyone
    assert ask(job, w0, 0, role="server") == [(s0, wire.Where(1))]
    assert the_place(answer(job, s0, 1)) == "is at train.py:41 in load"


def test_several_questions_about_a_member_are_asked_once():
    job = Job(workers=3)
    w0, w1, w2, _ = job.everyone
    assert ask(job, w0, 1) == [(w1, wire.Where(1))]
    assert ask(job, w2, 1) == []
    assert [whom for whom, _ in answer(job, w1, 1)] == [w0, w2]
    assert ask(job, w0, 1) == [(w1, wire.Where(2))], "and again when it is asked later"


def test_a_question_that_is_repeated_over_another_link_is_answered_there():
    job = Job()
    w0, w1, _ = job.everyone
    question = wire.Locate(w0.me(), "worker", [1])
    assert job.say(w0, question) == [(w1, wire.Where(1))]
    assert job.handle(b"a new link", question) == []
    assert [whom for whom, _ in answer(job, w1, 1)] == [b"a new link"]


def test_a_member_answers_for_itself_alone_and_only_what_it_was_asked():
    job = Job(door=Door())
    w0, w1, _ = job.everyone
    assert answer(job, w1, 1) == [], "nobody has asked"
    ask(job, w0, 1)
    assert answer(job, w1, 2) == []
    for node in (wire.Node("worker", 0, 1), wire.Node("worker", 1, 2), wire.Node("worker", 9, 1)):
        assert job.handle(w1.beats, wire.Stacks(node, 1, "elsewhere", "", [])) == []
    assert the_place(answer(job, w1, 1)) == "is at train.py:41 in load"


def test_an_answer_over_a_link_with_another_key_does_not_count():
    keys = {b"link of worker 101": "one", b"heartbeat of worker 101": "one", b"a stranger": "another"}
    job = Job(door=Door(keys))
    w0, w1, _ = job.everyone
    ask(job, w0, 1)
    assert job.handle(b"a stranger", wire.Stacks(w1.node, 1, "elsewhere", "", [])) == []
    assert the_place(answer(job, w1, 1)) == "is at train.py:41 in load"


def test_only_members_may_ask():
    job = Job()
    ((whom, reply),) = job.handle(
        b"a stranger", wire.Locate(wire.Sender(wire.Node("worker", 5, 1), 1, 0), "worker", [0])
    )
    assert (whom, reply.kind) == (b"a stranger", "UsageError")


@pytest.mark.parametrize(
    ("state", "words"),
    [("left", "has left the job"), ("unknown", "is not known"), ("unheard", "has not been heard yet")],
)
def test_who_cannot_be_asked_is_told_of_at_once(state, words):
    job = Job(start=state != "unheard")
    w0, w1, _ = job.everyone
    if state == "left":
        job.say(w1, w1.leave())
    if state == "unheard":
        for member in job.everyone:
            job.say(member, member.join())
            member.incarnation = 1
    assert the_place(ask(job, w0, 7 if state == "unknown" else 1)) == words


def test_a_member_that_beats_and_does_not_answer():
    job = Job()
    w0, w1, _ = job.everyone
    ask(job, w0, 1)
    job.now += ANSWER_S / 2
    assert job.beat(w1) == [wire.Alive()]
    assert the_place(time_over(job)) == "is alive, and has not said in 1.5 s where it is"


def test_a_process_that_is_there_and_whose_heartbeat_is_silent_is_in_a_call_that_keeps_the_interpreters_lock():
    job = Job()
    w0, w1, _ = job.everyone
    job.now += 4
    job.handle(BESIDE, wire.ProcessAlive(w1.node))
    assert ask(job, w0, 1) == [(w1, wire.Where(1)), (BESIDE, wire.Where(1))]
    assert the_place(time_over(job)) == (
        "is in a call that keeps the interpreter's lock, it seems: no heartbeat for 6 s"
    )


def test_what_the_process_beside_a_silent_member_knows_is_told():
    job = Job()
    w0, w1, _ = job.everyone
    job.handle(BESIDE, wire.ProcessAlive(w1.node))
    ask(job, w0, 1)
    stopped = wire.Stacks(w1.node, 1, "train.py:41 in load", "is stopped by a signal", [])
    assert job.handle(BESIDE, stopped) == [], "its own answer may still come"
    assert the_place(time_over(job)) == (
        "is stopped by a signal: no sign of life for 2 s; at its last beat it was at train.py:41 in load"
    )


def test_the_members_own_answer_is_better_than_that_of_the_process_beside_it():
    job = Job()
    w0, w1, _ = job.everyone
    job.handle(BESIDE, wire.ProcessAlive(w1.node))
    ask(job, w0, 1)
    job.handle(BESIDE, wire.Stacks(w1.node, 1, "train.py:1 in before", "", []))
    assert the_place(answer(job, w1, 1)) == "is at train.py:41 in load"


@pytest.mark.parametrize("pulse", [False, True])
def test_a_member_of_whom_nothing_is_heard(pulse):
    job = Job()
    w0, w1, _ = job.everyone
    if pulse:
        job.handle(BESIDE, wire.ProcessAlive(w1.node))
        job.beat(w1)
    ask(job, w0, 1)
    busy = "" if pulse else ", or in a call that keeps the interpreter's lock"
    assert the_place(time_over(job)) == f"does not answer: no sign of life for 2 s, so stopped{busy}, or not reached"


def lost_after(job: Job, member: Member) -> str | None:
    """Why the job fails when all but ``member`` beat on."""
    for _ in range(3):
        for other in job.everyone:
            if other is not member:
                job.beat(other)
        job.tick(LIMIT / 2)
    return job.scheduler.failure


def test_a_member_that_is_lost_while_it_is_stopped_is_said_to_be():
    job = Job()
    _, w1, _ = job.everyone
    stopped = wire.Stacks(w1.node, UNASKED, "train.py:41 in load", "is stopped by a signal", [])
    for _ in range(2):  # it is stopped, goes on, and is stopped again
        job.handle(BESIDE, wire.ProcessAlive(w1.node))
        assert job.handle(BESIDE, stopped) == []
    assert lost_after(job, w1) == (
        "worker 1 is lost: it has been silent for 12.5 s; it is stopped by a signal, and was at train.py:41 in load at "
        "its last beat"
    )


def test_what_is_known_of_a_stop_is_forgotten_when_it_is_over_and_comes_over_the_pulses_link_alone():
    job = Job()
    _, w1, _ = job.everyone
    stopped = wire.Stacks(w1.node, UNASKED, "train.py:41 in load", "is stopped by a signal", [])
    for message in (stopped, wire.ProcessAlive(w1.node), stopped, wire.ProcessAlive(w1.node)):
        job.handle(BESIDE, message)
    job.handle(w1.peer, stopped)
    assert lost_after(job, w1) == "worker 1 is lost: it has been silent for 12.5 s"


def test_a_member_that_is_lost_meanwhile():
    job = Job()
    w0, w1, _ = job.everyone
    ask(job, w0, 1)
    job.say(w1, w1.leave())
    assert the_place([entry for entry in time_over(job) if isinstance(entry[1], wire.Located)]) == "has left the job"


def test_the_first_members_are_asked_and_the_oldest_of_many_questions_is_answered_early(monkeypatch):
    job = Job(workers=MOST_LOCATED + 2)
    w0, w1 = job.workers[:2]
    assert len(ask(job, w0, *range(1, MOST_LOCATED + 2))) == MOST_LOCATED
    monkeypatch.setattr(inquiries, "MOST_LOOKS", 1)
    ((whom, located),) = ask(job, w1, 0, 1)[1:]
    assert (whom, located.ranks) == (w0, [*range(1, MOST_LOCATED + 1)])


def test_observers_get_the_stacks_of_those_who_have_answered():
    job = Job(workers=3)
    _, w1, w2, _ = job.everyone
    observer = wire.Sender(wire.Node("observer", 0, 77), 1, 0)
    job.scheduler.observing.inquiries.locate(b"an observer", wire.Locate(observer, "worker", [1, 2]), job.now)
    assert answer(job, w1, 1) == [(w1, wire.Where(1)), (w2, wire.Where(2))]
    ((whom, located),) = time_over(job)
    assert whom == b"an observer"
    assert wire.decode(located.buffers) == wire.Stacks(
        w1.node, 1, "train.py:41 in load", "", [["MainThread", ["train.py:41 in load"]]]
    )


def test_others_of_the_scheduler_may_look():
    job = Job()
    _, w1, _ = job.everyone
    seen: list[Any] = []
    job.scheduler.observing.inquiries.look("worker", [1], job.now, seen.append)
    answer(job, w1, 1)
    ((rank, sighting),) = seen[0].items()
    assert (rank, sighting.words, sighting.stacks.place) == (1, "is at train.py:41 in load", "train.py:41 in load")


def test_a_question_keeps_nobody_alive():
    job = Job()
    w0, w1, s0 = job.everyone
    job.tick(LIMIT - 1)
    for member in (w0, s0):
        job.handle(member.beats, wire.Beat(member.node))
    ask(job, w0, 1)
    answer(job, w1, 1)
    job.tick(2)
    assert job.scheduler.failure == "worker 1 is lost: it has been silent for 11.0 s"
