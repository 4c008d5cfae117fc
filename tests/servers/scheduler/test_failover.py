"""A job whose servers have standbys, as its members see it: who is told what when one of them ends."""

from __future__ import annotations

import pytest
from asking import Door, sender, text_of
from rendezvous import LIMIT, Job, Member

from kvstore import wire
from servers.scheduler.failover import ServerView, Views

KILLED = "was killed by SIGKILL"


class ReplicatedJob(Job):
    """Two workers, two servers and their standbys."""

    def __init__(self, **options: object) -> None:
        super().__init__(2, 2, replicas=1, **options)  # type: ignore[arg-type]

    def lose(self, member: Member, how: str = KILLED) -> list[tuple[object, wire.Message]]:
        return self.handle(b"launcher", wire.Lost(member.role, member.hint, how, member.start))

    def restart(self, member: Member) -> tuple[Member, list[tuple[object, wire.Message]]]:
        """Let the next process of a member join and beat; return it, and what others were told."""
        other = member.again()
        members = self.servers if member.role == "server" else self.standbys
        members[member.hint] = other
        self.gone.append(member)
        told = self.say(other, other.join())
        other.incarnation = other.start
        return other, told

    def stand(self, member: Member, epoch: int, *, synced: bool = False) -> list[tuple[object, wire.Message]]:
        return self.handle(member.beats, wire.Standing(member.node, epoch, 7, synced))


def seat(member: Member) -> list[object]:
    return [member.role, member.start]


def view(epoch: int, primary: Member, standby: Member | None = None, synced: bool = False) -> wire.View:
    return wire.View(
        wire.Node(primary.role, primary.hint, primary.start),
        epoch,
        standby=None if standby is None else seat(standby),
        standby_address="" if standby is None else f"at {standby.nonce}",
        synced=synced,
    )


def test_all_seats_join_and_each_learns_its_view_at_its_first_beat():
    job = ReplicatedJob(start=False)
    *others, last = job.everyone
    for member in others:
        assert job.say(member, member.join()) == []
    assert job.reply(others[0], others[0].explain(1)).text == "waits for standby of server 1 to join"
    welcomes = dict(job.say(last, last.join()))
    assert {(m.role, m.hint): (w.rank, w.incarnation) for m, w in welcomes.items()} == {
        (m.role, m.hint): (m.hint, 1) for m in job.everyone
    }
    assert {tuple(welcome.servers) for welcome in welcomes.values()} == {("at 20", "at 21")}
    for member in job.everyone:
        member.incarnation = 1
    for rank in range(2):
        both = job.servers[rank], job.standbys[rank]
        for member in both:
            assert job.beat(member) == [wire.Alive(), view(1, *both, synced=True)]
            assert job.beat(member) == [wire.Alive()], "once over each link"
    assert job.beat(job.workers[0]) == [wire.Alive()], "a worker has been welcomed by the servers themselves"


def test_when_a_server_is_lost_its_standby_takes_over_and_workers_are_sent_there():
    job = ReplicatedJob()
    (w0, w1), s1, b1 = job.workers, job.servers[1], job.standbys[1]
    moved = wire.Moved(1, 2, "at 31")
    assert job.lose(s1) == [(b1, view(2, b1)), (w0, moved), (w1, moved)]
    assert job.lose(s1) == [], "known"
    assert job.scheduler.failure is None
    assert job.beat(w0) == [wire.Alive()]
    w0.beats = b"made anew"
    assert job.beat(w0) == [wire.Alive(), moved], "what went over the old link may be lost"
    assert job.scheduler.take_news() == []
    job.now += 0.5
    assert job.stand(b1, 2) == []
    line = f"server 1 {KILLED}; its standby took over at round 7 in 0.5 s; a new standby is being made"
    assert job.scheduler.take_news() == [line]
    assert job.scheduler.take_news() == []
    assert job.reply(w0, wire.Census(w0.me())) == wire.Counted(w0.seq, 1)
    again = job.reply(w1, w1.join())
    assert again.servers == ["at 20", "at 31"], "a welcome that was lost, said again"


def test_the_next_process_of_a_lost_server_becomes_the_standby_and_may_take_over_in_its_turn():
    job = ReplicatedJob()
    (w0, w1), s1, b1 = job.workers, job.servers[1], job.standbys[1]
    job.lose(s1)
    new, told = job.restart(s1)
    assert told == [
        (new, wire.Welcome(1, rank=1, incarnation=2, num_workers=2, servers=["at 20", "at 31"])),
        (b1, view(3, b1, new)),
    ]
    assert job.beat(new) == [wire.Alive(), view(3, b1, new)]
    assert job.reply(w0, wire.Census(w0.me())) == wire.Counted(w0.seq, 0), "nobody is missing"
    assert job.stand(b1, 2, synced=True) == [], "of the view before"
    assert job.stand(b1, 3, synced=True) == [(new, view(4, b1, new, synced=True)), (b1, view(4, b1, new, synced=True))]
    moved = wire.Moved(1, 5, f"at {new.nonce}")
    assert job.lose(b1) == [(new, view(5, new)), (w0, moved), (w1, moved)]
    third, told = job.restart(b1)
    assert (new, view(6, new, third)) in told
    assert job.scheduler.failure is None


def test_a_server_goes_on_without_its_standby_and_workers_hear_nothing():
    job = ReplicatedJob()
    s0, b0 = job.servers[0], job.standbys[0]
    assert job.lose(b0) == [(s0, view(2, s0))]
    assert job.scheduler.take_news() == [f"the standby of server 0 {KILLED}; a new one is being made"]
    new, told = job.restart(b0)
    assert told[1:] == [(s0, view(3, s0, new))]


@pytest.mark.parametrize(("again", "reason"), [(False, ", and had no standby at that time"), (True, " before its new")])
def test_a_server_that_is_lost_without_a_standby_in_step_ends_the_job(again: bool, reason: str):
    job = ReplicatedJob()
    s1, b1 = job.servers[1], job.standbys[1]
    job.lose(s1)
    if again:
        job.restart(s1)
    told = job.lose(b1)
    assert job.scheduler.failure is not None
    assert job.scheduler.failure.startswith(f"server 1 {KILLED}{reason}")
    assert (job.workers[0], wire.JobFailed(job.scheduler.failure, "start 1 of standby 1")) in told
    late = s1.again().again()
    assert text_of(job.handle(late.peer, late.join())[0][1], "NodeLost") == job.scheduler.failure


def test_silence_is_a_loss_and_who_speaks_again_is_shown_a_view_without_it():
    job = ReplicatedJob()
    s1, b1 = job.servers[1], job.standbys[1]
    job.tick(LIMIT * 0.75)
    for member in job.everyone:
        if member is not s1:
            job.beat(member)
    told = job.tick(LIMIT * 0.5)
    assert (b1, view(2, b1)) in told
    assert job.beat(s1) == [view(2, b1)]
    assert job.handle(s1.beats, wire.Standing(s1.node, 1, 9, synced=True)) == []
    job.stand(b1, 2)
    assert job.scheduler.take_news()[0].startswith("server 1 has been silent for 12.5 s; its standby took over")
    farewell = s1.leave("it was replaced")
    assert job.say(s1, farewell) == [(s1, wire.Ack(farewell.seq))]
    new, _ = job.restart(s1)
    job.handle(b"launcher", wire.Lost("server", 1, "exited with code 4", 1))
    assert job.beat(new) == [wire.Alive(), view(3, b1, new)], "that its predecessor has ended is no news of it"
    assert job.beat(s1) == [view(3, b1, new)]
    assert text_of(job.reply(s1, s1.leave()), "UsageError").endswith("is not a member of this job")
    assert job.scheduler.failure is None


def test_a_stranger_is_shown_no_view():
    keys = {b"link of server 20": "key 20", b"heartbeat of server 20": "key 20", b"other": "another key"}
    job = ReplicatedJob(door=Door(keys))
    s0 = job.servers[0]
    job.handle(s0.beats, wire.Lost("server", 0, KILLED, 1))
    for link, node in (
        (b"other", s0.node),
        (s0.beats, wire.Node("server", 9, 1)),
        (s0.beats, wire.Node("worker", 9, 1)),
    ):
        ((_, told),) = job.handle(link, wire.Beat(node))
        assert told == wire.JobFailed(f"{node} is not a member of this job, or was given up")


def test_a_server_that_starts_again_shows_by_that_that_it_had_ended():
    """The launcher's report may come later, or be lost with a scheduler that was restarted."""
    job = ReplicatedJob()
    s1, b1 = job.servers[1], job.standbys[1]
    new, told = job.restart(s1)
    assert (b1, view(2, b1)) in told
    assert (b1, view(3, b1, new)) in told
    assert job.lose(s1) == []
    assert job.beat(new) == [wire.Alive(), view(3, b1, new)]


def test_only_a_later_start_with_its_predecessors_key_takes_a_seat():
    door = Door()
    job = ReplicatedJob(door=door, start=False)
    for member in job.everyone:
        door.keys |= dict.fromkeys((member.peer, member.beats), f"key of {member.nonce}")
    job.start()
    s1 = job.servers[1]
    new = s1.again()
    door.keys[new.peer] = "another key"
    assert "already" in text_of(job.handle(new.peer, new.join())[0][1], "UsageError"), "s1 is alive, as far as is known"
    assert job.beat(s1) == [wire.Alive()]
    job.handle(s1.beats, wire.Lost("server", 1, KILLED, 1))
    text = text_of(job.handle(new.peer, new.join())[0][1], "UsageError")
    assert text == "server 1 has joined with another key; start it again with the same"
    old = Member("server", 777, 1)
    door.keys[old.peer] = "key of 21"
    text = text_of(job.handle(old.peer, old.join())[0][1], "UsageError")
    assert text == "start 1 of server 1 (KVSTORE_START) is known to have ended"
    door.keys |= {new.peer: "key of 21", new.beats: "key of 21"}
    assert isinstance(dict(job.handle(new.peer, new.join()))[new.peer], wire.Welcome)


def test_before_all_have_joined_a_seat_waits_for_its_next_start():
    job = ReplicatedJob(start=False)
    s0, b0 = job.servers[0], job.standbys[0]
    *others, last = [member for member in job.everyone if member not in (s0, b0)]
    for member in (s0, *others):
        job.say(member, member.join())
    assert job.lose(s0) == job.lose(b0) == []
    assert job.scheduler.failure is None
    ended = b"of the first start"
    assert "is known to have ended" in text_of(job.handle(ended, b0.join())[0][1], "UsageError")
    job.say(last, last.join())
    for member in (s0, b0):
        new, told = job.restart(member)
    assert dict(told)[new].incarnation == 2
    assert job.beat(new) == [wire.Alive(), view(1, job.servers[0], new, synced=True)]


def test_a_start_that_never_joined_and_its_end_are_no_news():
    job = ReplicatedJob()
    s1 = job.servers[1]
    job.lose(s1)
    assert job.handle(b"launcher", wire.Lost("server", 1, "exited with code 1", 2)) == []
    second = s1.again()
    assert "start 2 of server 1" in text_of(job.handle(second.peer, second.join())[0][1], "UsageError")
    third = second.again()
    assert isinstance(dict(job.handle(third.peer, third.join()))[third.peer], wire.Welcome)


def test_a_server_that_leaves_in_the_middle_is_lost():
    job = ReplicatedJob()
    s0, b0 = job.servers[0], job.standbys[0]
    leave = s0.leave("it ended with MemoryError()")
    assert (b0, view(2, b0)) in job.say(s0, leave)
    assert job.scheduler.failure is None
    new, told = job.restart(s0)
    assert (b0, view(3, b0, new)) in told
    hasty = wire.Leave(sender(-1, 2, incarnation=new.nonce), error="it gave up joining")
    assert (b0, view(4, b0)) in job.say(new, hasty)


def retire(job: ReplicatedJob, member: Member) -> list[tuple[object, wire.Message]]:
    return job.handle(b"launcher", wire.Retire(member.role, member.hint, member.start))


def test_a_server_that_is_to_be_moved_hands_over_to_its_standby_and_is_told_to_end():
    job = ReplicatedJob()
    (w0, w1), s1, b1 = job.workers, job.servers[1], job.standbys[1]
    moved = wire.Moved(1, 2, "at 31")
    assert retire(job, s1) == [(s1, wire.Stop()), (b1, view(2, b1)), (w0, moved), (w1, moved)]
    assert retire(job, s1) == [], "known"
    assert job.beat(s1) == [wire.Alive()]
    s1.beats = b"made anew"
    assert wire.Stop() in job.beat(s1), "the order may have been lost with its link"
    assert job.stand(b1, 2) == []
    assert job.scheduler.take_news() == [
        "server 1 is moved; its standby took over at round 7 in 0 ms; a new standby is being made"
    ]
    assert job.lose(s1) == [], "how it ends is nobody's loss"
    s2, told = job.restart(s1)
    assert (b1, view(3, b1, s2)) in told
    job.beat(s2)
    assert retire(job, b1) == [], "the only one of its rank goes on until the other one is in step"
    moved = wire.Moved(1, 5, f"at {s2.nonce}")
    told = job.stand(b1, 3, synced=True)
    assert all(notice in told for notice in ((b1, wire.Stop()), (s2, view(5, s2)), (w0, moved)))
    assert job.scheduler.failure is None


def test_a_standby_that_is_to_be_moved_ends_at_once():
    job = ReplicatedJob()
    s1, b1 = job.servers[1], job.standbys[1]
    assert retire(job, b1) == [(s1, view(2, s1)), (b1, wire.Stop())]
    again, told = job.restart(b1)
    assert (s1, view(3, s1, again)) in told
    assert retire(job, b1) == [], "an order about a process before it"


def test_a_process_that_dies_before_it_could_retire_is_lost_as_ever():
    job = ReplicatedJob()
    s1, b1 = job.servers[1], job.standbys[1]
    job.lose(b1)
    job.restart(b1)
    assert retire(job, s1) == []
    job.lose(s1)
    assert job.scheduler.failure == "server 1 was killed by SIGKILL before its new standby was in step"


def test_a_job_may_end_while_a_server_is_dead_and_another_is_being_started():
    job = ReplicatedJob()
    (w0, w1), (s0, s1), (b0, b1) = job.workers, job.servers, job.standbys
    job.lose(s0)
    new, _ = job.restart(s0)
    job.beat(new)
    job.lose(s1)
    job.say(w1, w1.leave())
    assert {whom for whom, message in job.tick() if message == wire.Roster(1, [1])} == {new, b0, b1, s1}
    told = job.say(w0, w0.leave())
    assert {whom for whom, message in told if message == wire.Stop()} == {new, b0, b1, s1}
    late, told = job.restart(s1)
    assert [type(message) for _, message in told] == [wire.Welcome]
    assert job.beat(late) == [wire.Alive(), view(2, b1), wire.Stop()]
    assert job.beat(s1) == [wire.Stop()], "a zombie, too, may go"
    assert job.lose(b1) == [], "it was killed when nobody needed it any more"
    assert not job.scheduler.finished
    for member in (late, new, b0):
        leave = member.leave()
        assert job.say(member, leave) == [(member, wire.Ack(leave.seq))]
    assert job.scheduler.finished
    assert job.scheduler.failure is None


def test_without_replicas_a_standby_is_refused_and_a_second_start_is_none():
    job = Job()
    stray = Member("standby", 99, 0)
    text = text_of(job.handle(stray.peer, stray.join())[0][1], "UsageError")
    assert text == "this job has no standbys: KVSTORE_REPLICAS is 0 at the scheduler; set it alike everywhere"
    again = job.servers[0].again()
    assert text_of(job.handle(again.peer, again.join())[0][1], "UsageError") == "the job has its 1 servers already"
    job.handle(b"launcher", wire.Lost("server", 0, KILLED, 1))
    assert job.scheduler.failure == f"server 0 {KILLED}"


def test_aggregators_are_sent_to_the_new_server_too():
    job = Job(2, 1, aggregated=[[0, 1]], replicas=1)
    told = job.handle(b"launcher", wire.Lost("server", 0, KILLED))
    moved = wire.Moved(0, 2, "at 30")
    assert told == [
        (job.standbys[0], view(2, job.standbys[0])),
        *((m, moved) for m in (*job.workers, *job.aggregators)),
    ]


def test_what_is_not_started_again_ends_a_job_that_has_not_begun_and_else_is_done_without():
    job = ReplicatedJob(start=False)
    job.say(job.workers[0], job.workers[0].join())
    job.handle(b"launcher", wire.Lost("standby", 1, KILLED, 3, final=True))
    assert job.scheduler.failure == f"the standby of server 1 {KILLED}"
    job = ReplicatedJob()
    job.lose(job.standbys[1])
    job.handle(b"launcher", wire.Lost("standby", 1, "exited with code 1", 4, final=True))
    assert [line.partition(", and ")[2] for line in job.scheduler.take_news()][1:] == [
        "is not started again: server 1 goes on without one"
    ]
    assert job.scheduler.failure is None


def test_a_standby_that_its_primary_cannot_reach_is_lost_though_it_beats():
    job = ReplicatedJob()
    s0, b0 = job.servers[0], job.standbys[0]
    assert job.stand(s0, 1, synced=True) == []
    assert job.stand(s0, 1, synced=False) == [(s0, view(2, s0))]
    assert job.scheduler.take_news() == ["the standby of server 0 does not answer its server; a new one is being made"]
    assert job.beat(b0) == [view(2, s0)]
    assert job.stand(s0, 1, synced=False) == [], "that was the view before"
    new, told = job.restart(b0)
    assert told[1:] == [(s0, view(3, s0, new))]
    assert job.stand(s0, 3, synced=False) == [], "this one is not in step yet"
    assert job.beat(new) == [wire.Alive(), view(3, s0, new)]


A, B, NEXT = wire.Node("server", 1, 1), wire.Node("standby", 1, 1), wire.Node("server", 1, 2)
OTHERS = wire.Node("server", 0, 1), wire.Node("standby", 0, 1)


def begun() -> Views:
    views = Views()
    views.begin([OTHERS[0], A], [OTHERS[1], B])
    return views


def said(views: Views) -> list[str]:
    lines = list(views.news)
    views.news.clear()
    return lines


def test_in_the_beginning_each_server_has_its_standby_in_step():
    views = begun()
    assert views.of(1) == ServerView(1, A, B, synced=True)
    assert (views.of(2), views.of(-1), Views().of(0)) == (None, None, None)


def test_a_standby_takes_over_is_heard_of_and_gets_a_standby_of_its_own():
    views = begun()
    assert views.lose(A, "was killed by SIGKILL", 10.0) == ""
    assert views.of(1) == ServerView(2, B, None, synced=False)
    assert (views.takeovers, views.moved, said(views)) == (1, {1: 2}, []), "not before it serves"
    views.stand(wire.Standing(B, 2, 812, synced=False), 10.3)
    line = "server 1 was killed by SIGKILL; its standby took over at round 812 in 0.3 s; a new standby is being made"
    assert said(views) == [line]
    views.stand(wire.Standing(B, 2, 813, synced=False), 10.8)
    assert said(views) == [], "once"
    views.join(NEXT, 12.0)
    assert views.of(1) == ServerView(3, B, NEXT, synced=False)
    views.stand(wire.Standing(B, 3, 820, synced=False), 12.1)
    assert views.of(1) == ServerView(3, B, NEXT, synced=False)
    views.stand(wire.Standing(B, 3, 821, synced=True, nbytes=41_000_000), 12.2)
    assert views.of(1) == ServerView(4, B, NEXT, synced=True)
    assert said(views) == ["the standby of server 1 is in step again (41 MB in 0.2 s)"]
    assert views.lose(B, "was killed by SIGKILL", 13.0) == ""
    assert views.of(1) == ServerView(5, NEXT, None, synced=False)
    assert (views.takeovers, views.moved) == (2, {1: 5})
    assert views.of(0) == ServerView(1, *OTHERS, synced=True), "no other rank is touched"


def test_a_server_goes_on_without_its_standby_until_there_is_a_new_one():
    views = begun()
    assert views.lose(B, "exited with code 1", 1.0) == ""
    assert views.of(1) == ServerView(2, A, None, synced=False)
    assert (views.takeovers, said(views)) == (
        0,
        ["the standby of server 1 exited with code 1; a new one is being made"],
    )
    views.join(wire.Node("standby", 1, 2), 2.0)
    views.stand(wire.Standing(A, 3, 5, synced=True), 2.5)
    assert views.of(1) == ServerView(4, A, wire.Node("standby", 1, 2), synced=True)
    assert said(views) == ["the standby of server 1 is in step again, after 0.5 s"]


def test_a_server_without_a_standby_in_step_cannot_be_lost():
    views = begun()
    views.lose(B, "was killed", 1.0)
    assert views.lose(A, "was killed", 2.0) == "server 1 was killed, and had no standby at that time"
    views = begun()
    views.lose(B, "was killed", 1.0)
    views.join(wire.Node("standby", 1, 2), 2.0)
    assert views.lose(A, "was killed", 2.0) == "server 1 was killed before its new standby was in step"
    assert views.of(1) == ServerView(3, A, wire.Node("standby", 1, 2), synced=False), "the view stays as it was"


@pytest.mark.parametrize(
    "standing",
    [
        wire.Standing(A, 2, 9, synced=True),
        wire.Standing(B, 3, 9, synced=True),
        wire.Standing(wire.Node("server", 1, 2), 3, 9, synced=True),
        wire.Standing(wire.Node("server", 7, 1), 3, 9, synced=True),
        wire.Standing(A, 3, 9, synced=False),
    ],
)
def test_only_the_primary_of_the_latest_view_says_that_its_standby_is_in_step(standing: wire.Standing):
    views = begun()
    views.lose(B, "was killed", 1.0)
    views.join(wire.Node("standby", 1, 2), 2.0)
    views.stand(standing, 3.0)
    assert views.of(1) == ServerView(3, A, wire.Node("standby", 1, 2), synced=False)


def test_who_is_in_no_view_cannot_change_one():
    views = begun()
    views.lose(A, "was killed", 1.0)
    before = views.of(1)
    assert views.lose(A, "was killed", 2.0) == ""
    assert views.of(1) == before


def test_a_primary_that_is_alone_has_no_standby_that_could_be_in_step():
    views = begun()
    views.lose(B, "was killed", 1.0)
    views.stand(wire.Standing(A, 2, 9, synced=True), 3.0)
    assert views.of(1) == ServerView(2, A, None, synced=False)


def test_a_server_whose_standby_is_not_started_again_goes_on_without_one():
    views = begun()
    views.give_up(B, "is on a lost host")
    assert said(views) == [], "it has not been lost yet"
    views.lose(B, "is on a lost host", 1.0)
    line = "the standby of server 1 is on a lost host, and is not started again: server 1 goes on without one"
    assert said(views) == [line]
    views = begun()
    views.lose(A, "was killed", 1.0)
    views.stand(wire.Standing(B, 2, 3, synced=False), 1.0)
    assert said(views)[0].endswith("; a new standby is being made")
    views.give_up(wire.Node("server", 1, 4), "exited with code 1")
    line = "the standby of server 1 exited with code 1, and is not started again: server 1 goes on without one"
    assert said(views) == [line]
    views = begun()
    views.give_up(A, "was killed")
    views.lose(A, "was killed", 1.0)
    views.stand(wire.Standing(B, 2, 3, synced=False), 1.0)
    assert said(views) == ["server 1 was killed; its standby took over at round 3 in 0 ms; it has no standby now"]


@pytest.mark.parametrize(
    ("nbytes", "size"), [(93, "93 bytes"), (4120, "4.12 kB"), (410_000, "0.41 MB"), (41_000_000, "41 MB")]
)
def test_sizes_and_short_times_are_told_in_units_that_fit(nbytes: int, size: str):
    views = begun()
    views.lose(B, "was killed", 1.0)
    views.join(wire.Node("standby", 1, 2), 2.0)
    views.stand(wire.Standing(A, 3, 5, synced=True, nbytes=nbytes), 2.012)
    assert said(views)[1] == f"the standby of server 1 is in step again ({size} in 12 ms)"


def test_only_the_primary_of_the_latest_view_says_that_its_standby_does_not_answer():
    views, new = begun(), wire.Node("standby", 1, 2)
    views.lose(B, "was killed", 1.0)
    views.join(new, 2.0)
    views.stand(wire.Standing(A, 3, 5, synced=True), 2.5)
    late = wire.Standing(A, 3, 5, synced=False)  # said before the standby was in step
    others = wire.Standing(new, 4, 5, synced=False), wire.Standing(A, 4, 5, synced=True)
    assert [views.unanswering(standing) for standing in (late, *others)] == [None, None, None]
    assert views.unanswering(wire.Standing(A, 4, 5, synced=False)) == new
