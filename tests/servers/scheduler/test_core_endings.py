"""How members leave or are lost, and how the job ends, with a clock that the test moves."""

from __future__ import annotations

from asking import text_of
from rendezvous import LIMIT, Job

from kvstore import wire
from servers.scheduler.members import MemberState


def test_workers_leave_and_servers_are_told_when_to_stop():
    job = Job(2, 2)
    w0, w1, s0, s1 = job.everyone
    leave = w1.leave()
    assert job.say(w1, leave) == [(w1, wire.Ack(leave.seq))]
    assert job.tick() == [(s0, wire.Roster(1, [1])), (s1, wire.Roster(1, [1]))]
    assert not job.scheduler.finished
    leave = w0.leave()
    assert job.say(w0, leave) == [(w0, wire.Ack(leave.seq)), (s0, wire.Stop()), (s1, wire.Stop())]
    assert not job.scheduler.finished
    for server in (s0, s1):
        assert job.beat(server) == [wire.Alive(), wire.Stop()], "again, should the first have been lost"
        leave = server.leave()
        assert job.say(server, leave) == [(server, wire.Ack(leave.seq))]
    assert job.scheduler.finished
    assert job.scheduler.failure is None
    assert job.tick(10 * LIMIT) == [], "nobody who has left is missed"


def test_aggregators_are_told_who_has_left_and_when_to_stop():
    job = Job(2, 1, aggregated=[[0, 1]])
    w0, w1, s0, a0 = job.everyone
    job.say(w1, w1.leave())
    assert job.tick() == [(s0, wire.Roster(1, [1])), (a0, wire.Roster(1, [1]))]
    leave = w0.leave()
    assert job.say(w0, leave) == [(w0, wire.Ack(leave.seq)), (s0, wire.Stop()), (a0, wire.Stop())]
    job.say(s0, s0.leave())
    assert job.beat(a0) == [wire.Alive(), wire.Stop()]
    assert not job.scheduler.finished
    job.say(a0, a0.leave())
    assert job.scheduler.finished
    assert job.scheduler.failure is None


def test_servers_are_told_once_of_all_who_have_left_between_two_ticks():
    job = Job(4, 1)
    (s0,) = job.servers
    for worker in (job.workers[3], job.workers[1]):
        job.say(worker, worker.leave())
    assert job.tick() == [(s0, wire.Roster(1, [1, 3]))]
    assert job.tick() == []
    job.say(job.workers[0], job.workers[0].leave())
    assert job.tick() == [(s0, wire.Roster(2, [0, 1, 3]))]


def test_leaving_twice_is_leaving_once():
    job = Job()
    _, w1, _ = job.everyone
    leave = w1.leave()
    job.say(w1, leave)
    assert job.reply(w1, leave) == wire.Ack(leave.seq)
    other = w1.leave("with an error, this time")
    assert job.reply(w1, other) == wire.Ack(other.seq)
    assert job.scheduler.failure is None


def test_a_worker_that_leaves_with_an_error_ends_the_job():
    job = Job()
    w0, w1, s0 = job.everyone
    leave = w1.leave("ValueError: bad data")
    text = "worker 1 failed: ValueError: bad data"
    assert job.say(w1, leave) == [(w1, wire.Ack(leave.seq)), (w0, wire.JobFailed(text)), (s0, wire.JobFailed(text))]
    assert text_of(job.reply(w0, w0.barrier()), "NodeLost") == text


def test_a_long_error_still_reaches_everybody():
    job = Job()
    w0, w1, s0 = job.everyone
    outbox = job.say(w1, w1.leave("x" * 60_000))
    assert {whom: len(message.text) for whom, message in outbox if isinstance(message, wire.JobFailed)} == {
        w0: 4000,
        s0: 4000,
    }


def test_a_server_or_an_aggregator_may_not_leave_before_the_workers():
    for place, name in ((2, "server 0"), (3, "aggregator 0")):
        job = Job(aggregated=[[0, 1]])
        one = job.everyone[place]
        job.say(one, one.leave())
        assert job.scheduler.failure == f"{name} has left while workers need it"
        assert isinstance(job.beat(job.workers[0])[0], wire.JobFailed)


def test_an_aggregator_that_dies_ends_the_job_by_name():
    job = Job(aggregated=[[0, 1]])
    text = "aggregator 0 was killed by SIGKILL"
    told = job.handle(b"launcher", wire.Lost("aggregator", 0, "was killed by SIGKILL"))
    assert told == [(member, wire.JobFailed(text)) for member in (*job.workers, *job.servers)]
    silent = Job(aggregated=[[0, 1]])
    silent.tick(LIMIT * 0.75)
    for member in (*silent.workers, *silent.servers):
        silent.beat(member)
    assert {message.text.split(":")[0] for _, message in silent.tick(LIMIT * 0.5)} == {"aggregator 0 is lost"}


def test_the_launcher_says_who_died():
    job = Job()
    _, w1, s0 = job.everyone
    text = "worker 0 was killed by SIGKILL"
    assert job.handle(b"launcher", wire.Lost("worker", 0, "was killed by SIGKILL")) == [
        (w1, wire.JobFailed(text)),
        (s0, wire.JobFailed(text)),
    ]
    assert job.handle(b"launcher", wire.Lost("worker", 0, "was killed by SIGKILL")) == []
    assert job.handle(b"launcher", wire.Lost("worker", 1, "exited with 1")) == []
    assert job.scheduler.failure == text, "the first one counts"


def test_a_worker_that_left_and_then_failed_has_failed():
    job = Job()
    w0, w1, s0 = job.everyone
    job.say(w0, w0.leave())
    assert job.handle(b"launcher", wire.Lost("worker", 0, "exited with 3")) == [
        (w1, wire.JobFailed("worker 0 exited with 3")),
        (s0, wire.JobFailed("worker 0 exited with 3")),
    ]


def test_those_who_wait_for_who_has_left_are_told_after_its_farewell():
    job = Job(2, 1, farewell_s=1.0)
    w0, w1, s0 = job.everyone
    barrier = w1.barrier()
    job.say(w1, barrier)
    leave = w0.leave()
    assert job.say(w0, leave) == [(w0, wire.Ack(leave.seq))]
    job.now += 0.9
    assert job.named(job.scheduler.tick(job.now)) == []
    job.now += 0.2
    (answer, (whom, reply)) = sorted(job.named(job.scheduler.tick(job.now)), key=lambda sent: sent[0] is s0)
    assert answer[0] is w1
    assert text_of(answer[1], "NodeLost") == "worker 0 has left the job without coming to the barrier"
    assert (whom, reply) == (s0, wire.Roster(1, [0]))
    assert job.named(job.scheduler.tick(job.now)) == [], "once"


def test_there_is_no_farewell_to_wait_for_when_all_have_left():
    job = Job(2, 1, farewell_s=5.0)
    w0, w1, s0 = job.everyone
    job.say(w0, w0.leave())
    assert (s0, wire.Stop()) in job.say(w1, w1.leave())


def test_a_death_before_all_have_joined_is_told_to_those_who_wait():
    job = Job(2, 1, start=False)
    w0, w1, s0 = job.everyone
    job.say(w0, w0.join())
    job.say(s0, s0.join())
    replies = dict(job.handle(b"launcher", wire.Lost("worker", 1, "exited with 3")))
    assert {member: text_of(reply, "NodeLost") for member, reply in replies.items()} == {
        w0: "worker 1 exited with 3",
        s0: "worker 1 exited with 3",
    }
    for late in (w1, w0):
        assert text_of(job.reply(late, late.join()), "NodeLost") == "worker 1 exited with 3"


def test_who_dies_while_it_waits_is_named_by_the_rank_it_asked_for():
    job = Job(2, 1, start=False)
    w0, w1, _ = job.everyone
    job.say(w0, w0.join())
    job.say(w1, w1.join())
    assert [whom for whom, _ in job.handle(b"launcher", wire.Lost("worker", 1, "was killed"))] == [w0]


def test_after_a_failure_it_stays_until_all_have_gone_or_the_limit_is_over():
    job = Job(1, 1)
    w0, s0 = job.everyone
    job.say(w0, w0.leave("oops"))
    assert not job.scheduler.finished, "the server is still there"
    job.say(s0, s0.leave())
    assert job.scheduler.finished
    other = Job(1, 1)
    other.say(other.workers[0], other.workers[0].leave("oops"))
    other.now += LIMIT + 0.1
    other.scheduler.tick(other.now)
    assert other.scheduler.finished


def test_a_census_counts_the_lost_even_after_the_job_has_failed():
    job = Job()
    w0, _, _ = job.everyone
    census = wire.Census(w0.me())
    assert job.reply(w0, census) == wire.Counted(census.seq, 0)
    job.handle(b"launcher", wire.Lost("worker", 1, "was killed"))
    census = wire.Census(w0.me())
    assert job.reply(w0, census) == wire.Counted(census.seq, 1)


def test_states_of_a_whole_life():
    job = Job(1, 1)
    job.say(job.workers[0], job.workers[0].leave())
    job.say(job.servers[0], job.servers[0].leave())
    assert {m.state for m in job.scheduler.members.everyone} == {MemberState.LEFT}
