"""Heartbeats: which members they keep alive, and what is said in return."""

from __future__ import annotations

import pytest
from rendezvous import LIMIT, Job

from kvstore import wire
from servers.scheduler.departures import Departures, Rosters
from servers.scheduler.members import JobMember


def test_a_beat_keeps_a_member_alive():
    job = Job()
    for _ in range(20):
        assert job.tick(LIMIT / 2) == []
        for member in job.everyone:
            assert job.beat(member) == [wire.Alive()]
    assert job.scheduler.failure is None


def test_a_pulse_keeps_a_member_alive_and_is_not_answered():
    """Its process is there, though its interpreter has no time for a beat; notices go over the link of its beats."""
    job = Job()
    w0, w1, s0 = job.everyone
    for _ in range(10):
        assert job.tick(LIMIT / 2) == []
        for member in (w1, s0):
            assert job.beat(member) == [wire.Alive()]
        assert job.handle(b"beside worker 0", wire.ProcessAlive(wire.Node("worker", 0, 1))) == []
    assert job.scheduler.failure is None
    for stranger in (wire.ProcessAlive(wire.Node("worker", 0, 2)), wire.ProcessAlive(wire.Node("worker", 7, 1))):
        assert job.handle(b"a stranger", stranger) == []
    for _ in range(3):
        job.beat(w1)
        job.beat(s0)
        notices = job.tick(LIMIT / 2)
    text = "worker 0 is lost: it has been silent for 12.5 s"
    assert (w0, wire.JobFailed(text)) not in notices
    assert job.scheduler.failure == text


def test_a_silent_member_is_lost_and_everybody_else_is_told():
    job = Job()
    w0, _, s0 = job.everyone
    assert job.tick(LIMIT * 0.75) == []
    job.beat(w0)
    job.beat(s0)
    text = "worker 1 is lost: it has been silent for 12.5 s"
    assert job.tick(LIMIT * 0.5) == [(w0, wire.JobFailed(text)), (s0, wire.JobFailed(text))]
    assert job.tick(LIMIT * 0.5) == [], "once"
    assert job.beat(w0) == [wire.JobFailed(text), wire.Alive()], "but each beat is told again"


def test_a_server_that_falls_silent_is_named():
    job = Job()
    w0, w1, _ = job.everyone
    job.tick(LIMIT * 0.75)
    job.beat(w0)
    job.beat(w1)
    assert [(whom, message.text.split(":")[0]) for whom, message in job.tick(LIMIT * 0.5)] == [
        (w0, "server 0 is lost"),
        (w1, "server 0 is lost"),
    ]


def test_a_scheduler_that_was_stopped_blames_nobody_for_it():
    job = Job()
    job.now += 100 * LIMIT  # no tick in between: Ctrl-Z, a debugger, a machine that slept
    assert job.tick() == []
    assert job.tick(LIMIT) == []
    assert {message.text.split(":")[0] for _, message in job.tick(LIMIT / 4)} == {"worker 0 is lost"}


def test_a_zombie_is_told_that_it_was_given_up():
    job = Job()
    _, w1, _ = job.everyone
    job.handle(b"launcher", wire.Lost("worker", 1, "was killed"))
    assert job.beat(w1) == [wire.JobFailed("worker 1 is not a member of this job, or was given up")]


@pytest.mark.parametrize(
    "beat",
    [
        wire.Beat(wire.Node("worker", 0, 2)),
        wire.Beat(wire.Node("worker", 0, 0)),
        wire.Beat(wire.Node("worker", 7, 1)),
        wire.Beat(wire.Node("launcher", 0, 1)),
    ],
)
def test_a_stranger_keeps_nobody_alive(beat: wire.Beat):
    job = Job()
    job.tick(LIMIT * 0.75)
    ((whom, message),) = job.handle(b"stranger", beat)
    assert whom == b"stranger"
    assert isinstance(message, wire.JobFailed)
    assert job.tick(LIMIT * 0.5) != []


def test_a_server_that_has_not_beaten_yet_is_told_at_its_first_beat():
    job = Job(2, 1, start=False)
    w0, w1, s0 = job.everyone
    for member in job.everyone:
        job.say(member, member.join())
        member.incarnation = 1
    job.say(w1, w1.leave())
    assert job.tick() == []
    assert job.beat(s0) == [wire.Alive(), wire.Roster(1, [1])]
    assert job.beat(w0) == [wire.Alive()]


def test_a_server_is_told_again_who_has_left_when_its_link_has_been_made_anew():
    job = Job(3, 1)
    w0, w1, _, s0 = job.everyone
    job.say(w1, w1.leave())
    job.tick()
    assert job.beat(s0) == [wire.Alive()]
    s0.beats = b"made anew"
    assert job.beat(s0) == [wire.Alive(), wire.Roster(1, [1])]
    assert job.beat(s0) == [wire.Alive()]
    job.say(w0, w0.leave())
    assert job.tick() == [(s0, wire.Roster(2, [0, 1]))]


def test_rank_0_that_has_not_beaten_yet_learns_of_a_contradiction_at_its_first_beat():
    job = Job(2, 1, start=False)
    w0, w1, _ = job.everyone
    for member in job.everyone:
        job.say(member, member.join())
        member.incarnation = 1
    job.say(w0, w0.declare("a"))
    job.say(w1, w1.declare("a", shape=[2]))
    alive, fault = job.beat(w0)
    assert (alive, type(fault)) == (wire.Alive(), wire.Fault)


def test_the_others_know_of_a_worker_that_has_left_after_its_farewell():
    departures = Departures(5.0)
    departures.add(3, 10.0)
    departures.add(1, 12.0)
    assert (departures.left, departures.known) == ({1, 3}, set())
    assert departures.due(14.9, all_gone=False) == []
    assert departures.due(15.0, all_gone=False) == [3]
    assert departures.due(15.0, all_gone=False) == [], "once"
    assert departures.known == {3}
    assert departures.due(17.0, all_gone=False) == [1]
    assert departures.left == departures.known == {1, 3}


def test_when_nobody_is_left_there_is_no_farewell_to_wait_for():
    departures = Departures(5.0)
    for rank in (2, 0):
        departures.add(rank, 10.0)
    assert departures.due(10.0, all_gone=True) == [2, 0]


def test_news_go_once_over_each_link_but_the_end_at_each_beat():
    sent: list[wire.Message] = []
    rosters = Rosters(lambda peer, message: sent.append(message))
    member = JobMember("server", 1, 0, "here", b"link", 1)
    rosters.change([3, 1], over=False)
    rosters.inform(member)
    assert sent == [], "it has not beaten yet"
    member.peer = b"beats"
    for _ in range(2):
        rosters.inform(member)
    assert sent == [wire.Roster(1, [1, 3])]
    rosters.change([0, 1, 3], over=True)
    for _ in range(2):
        rosters.inform(member)
    assert (sent[1:], rosters.over) == ([wire.Stop(), wire.Stop()], True)
