"""The scheduler as a whole, with a clock that the test moves: who joins, and what members ask."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
from asking import sender, sent, text_of
from rendezvous import LIMIT, Job, Member

from kvstore import wire
from kvstore.errors import UsageError
from servers.requests.reply_links import ReplyLinks
from servers.scheduler.core import REMIND_S, JoinRequests
from servers.scheduler.failover import Failover
from servers.scheduler.members import Members, MemberState


def test_all_are_welcomed_when_the_last_has_come():
    job, w0, w1, s0, s1 = Job(2, 2, start=False).and_members()
    for member in (s1, w1, s0):
        assert job.say(member, member.join()) == []
    welcomes = dict(job.say(w0, w0.join()))
    assert welcomes == {
        member: wire.Welcome(1, rank=member.hint, incarnation=1, num_workers=2, servers=["at 20", "at 21"])
        for member in (w0, w1, s0, s1)
    }


def test_ranks_are_given_in_the_order_of_coming_to_those_who_do_not_care():
    job, w0, w1, s0 = Job(2, 1, start=False).and_members()
    for member in job.everyone:
        member.hint = -1
    job.say(w1, w1.join())
    job.say(s0, s0.join())
    assert {m: welcome.rank for m, welcome in job.say(w0, w0.join())} == {w1: 0, w0: 1, s0: 0}


def test_who_joins_twice_is_one_member_and_is_welcomed_where_it_asked_last():
    job, w0, w1, s0 = Job(2, 1, start=False).and_members()
    again = Member("worker", w0.nonce, 0)
    again.peer = b"another link"
    job.say(w0, w0.join())
    assert job.say(again, again.join()) == []
    job.say(s0, s0.join())
    job.workers[0] = again
    assert [whom for whom, _ in job.say(w1, w1.join())] == [again, s0, w1]
    assert isinstance(job.reply(again, again.join()), wire.Welcome)
    assert len(job.scheduler.members.everyone) == 3


def test_a_full_job_takes_nobody():
    job = Job(1, 1)
    late = Member("worker", 99)
    ((whom, reply),) = job.say(late, late.join())
    assert whom == late.peer
    assert text_of(reply, "UsageError") == "the job has its 1 workers already"


def test_workers_are_told_of_their_aggregator_and_servers_of_who_speaks_for_whom():
    aggregated = [[0, 2], [1, 3]]
    job = Job(5, 1, aggregated=aggregated, start=False)
    *others, last = job.everyone
    for member in others:
        assert job.say(member, member.join()) == []
    welcomes = dict(job.say(last, last.join()))
    assert [welcomes[worker].aggregator for worker in job.workers] == ["at 50", "at 51", "at 50", "at 51", ""]
    for member in job.servers:
        assert (welcomes[member].aggregated, welcomes[member].aggregator) == (aggregated, "")
    told = [welcomes[aggregator].aggregated for aggregator in job.aggregators]
    assert told == [[[0, 2], []], [[], [1, 3]]], "each of its own workers: hundreds need not hear of thousands"
    assert all(welcomes[worker].aggregated == [] for worker in job.workers)
    assert {tuple(welcome.servers) for welcome in welcomes.values()} == {("at 20",)}
    assert [welcomes[aggregator].rank for aggregator in job.aggregators] == [0, 1]


def test_a_worker_cannot_name_an_aggregator_that_the_job_has_not():
    job, w0, w1, _, a0 = Job(2, 1, aggregated=[[0]], start=False).and_members()
    assert job.say(w0, w0.join()) == []
    w1.aggregator = 1
    assert text_of(job.reply(w1, w1.join()), "UsageError") == (
        "worker 1 names aggregator 1 as its own (KVSTORE_AGGREGATOR), and the scheduler expects 1 of them "
        "(KVSTORE_NUM_AGGREGATORS): set both alike in all processes of the job, as launch.py does"
    )
    assert job.reply(w0, w0.explain(1)).text == "waits for worker 1 and server 0 and aggregator 0 to join"
    stranger = Job(1, 1, start=False).scheduler.handle(b"link", a0.join(), 0.0)
    assert text_of(stranger[0][1], "UsageError") == "the job has its 0 aggregators already"


def test_while_it_waits_it_explains_for_whom():
    job, w0, w1, s0, s1 = Job(2, 2, start=False).and_members()
    job.say(w0, w0.join())
    job.say(s1, s1.join())
    assert job.reply(w0, w0.explain(1)).text == "waits for worker 1 and server 0 to join"
    assert job.reply(w1, w1.explain(1)).text == "", "who has not joined is told nothing"
    job.say(w1, w1.join())
    job.say(s0, s0.join())
    assert job.reply(w0, w0.explain(1)).text == ""


def test_who_gives_up_joining_leaves_its_place_to_another():
    job, w0, w1, s0 = Job(2, 1, start=False).and_members()
    for member in (w0, s0):
        job.say(member, member.join())
    hasty = wire.Leave(sender(-1, 2, incarnation=w0.nonce), error="it gave up joining")
    assert job.reply(w0, hasty) == wire.Ack(2)
    assert text_of(job.reply(w0, hasty), "UsageError").endswith("is not a member of this job")
    assert job.reply(s0, s0.explain(1)).text == "waits for worker 0, worker 1 to join"
    again = job.workers[0] = Member("worker", 99, 0)
    job.say(w1, w1.join())
    assert {member: welcome.rank for member, welcome in job.say(again, again.join())} == {again: 0, w1: 1, s0: 0}
    assert job.scheduler.failure is None


def test_who_gives_up_when_it_has_just_been_welcomed_fails_the_job():
    job, w0, w1, s0 = Job().and_members()
    text = "worker 1 failed: it gave up joining"
    told = job.say(w1, wire.Leave(sender(-1, 2, incarnation=w1.nonce), error="it gave up joining"))
    assert told == [(w1, wire.Ack(2)), (w0, wire.JobFailed(text)), (s0, wire.JobFailed(text))]
    assert job.scheduler.members.everyone[1].state is MemberState.LEFT


def test_who_gives_up_because_the_job_has_failed_stays_counted_as_gone():
    job, w0, _, _ = Job(2, 1, start=False).and_members()
    job.say(w0, w0.join())
    job.handle(b"launcher", wire.Lost("worker", 1, "ended with code 1"))
    assert job.reply(w0, wire.Leave(sender(-1, 2, incarnation=w0.nonce), error="NodeLost")) == wire.Ack(2)
    assert job.scheduler.failure == "worker 1 ended with code 1"
    assert job.scheduler.finished


def test_now_and_then_it_says_who_is_missing(caplog: pytest.LogCaptureFixture):
    job = Job(2, 1, start=False)
    job.tick(REMIND_S - 1)
    assert not caplog.messages
    job.say(job.servers[0], job.servers[0].join())
    job.tick(1)
    assert caplog.messages == ["the scheduler waits for worker 0, worker 1 to join"]
    job.say(job.workers[0], job.workers[0].join())
    job.tick(REMIND_S * 1.5)
    assert caplog.messages[1:] == ["the scheduler waits for worker 1 to join"]
    job.say(job.workers[1], job.workers[1].join())
    job.tick(LIMIT / 2)
    job.scheduler.tick(job.now + 2 * REMIND_S)
    assert len(caplog.messages) == 2


# ---- requests


def test_a_barrier_lets_all_go_and_stores_have_their_own():
    job, w0, w1, _ = Job().and_members()
    first, other = w0.barrier(), w0.barrier(store=1)
    assert job.say(w0, first) == job.say(w0, other) == []
    reason = "waits at the barrier for worker 1 (has not come yet)"
    asked = w0.explain(first.seq)
    assert job.reply(w0, asked) == wire.Explanation(asked.seq, reason, [1])
    last = w1.barrier()
    assert dict(job.say(w1, last)) == {w0: wire.Ack(first.seq), w1: wire.Ack(last.seq)}
    assert job.reply(w0, first) == wire.Ack(first.seq), "a repeat is answered again"
    assert job.say(w0, other) == [], "and one that waits when it is time"


def test_who_waits_is_answered_over_the_link_that_it_asks_again_over():
    job, w0, w1 = Job().and_workers()
    here = w0.barrier()
    for link in (w0.peer, b"made anew", w0.peer):  # the last is what was left of the first
        assert job.scheduler.handle(link, sent(here), job.now) == []
    assert {whom for whom, _ in job.say(w1, w1.barrier())} == {w0, b"made anew", w1}


def test_a_barrier_without_those_who_have_left_fails():
    job, w0, w1, w2, _ = Job(3, 1).and_members()
    early = w0.barrier()
    job.say(w0, early)
    job.say(w2, w2.leave())
    replies = [m for whom, m in job.tick() if whom is w0]
    assert [text_of(reply, "NodeLost") for reply in replies] == [
        "worker 2 has left the job without coming to the barrier"
    ]
    assert "worker 2" in text_of(job.reply(w1, w1.barrier()), "NodeLost")


def test_who_came_to_the_barrier_may_leave_before_it_is_over():
    job, w0, w1, _ = Job().and_members()
    job.say(w0, w0.barrier())
    job.say(w0, w0.leave())
    late = w1.barrier()
    assert (w1, wire.Ack(late.seq)) in job.say(w1, late)


def test_keys_are_declared_and_ready():
    job, w0, w1, _ = Job().and_members()
    early = w1.declare("a", "b")
    assert job.say(w1, early) == []
    asked = w1.explain(early.seq)
    assert job.reply(w1, asked) == wire.Explanation(asked.seq, "waits for worker 0 to init 'a', 'b'", [0])
    mine = w0.declare("b", "a")
    assert job.reply(w0, mine) == wire.Placed(mine.seq, [1, 1], [1, 0], [0, 0], [0, 0], [1, 1])
    ready = wire.Ready(w0.me(), store=0, keys=["a", "b"])
    placed = wire.Placed(early.seq, [1, 1], [0, 1], [0, 0], [0, 0], [1, 1])
    assert dict(job.say(w0, ready)) == {w0: wire.Ack(ready.seq), w1: placed}
    for member, request, reply in ((w0, mine, None), (w0, ready, wire.Ack(ready.seq)), (w1, early, placed)):
        again = job.reply(member, request)
        assert reply is None or again == reply


def test_who_contradicts_rank_0_fails_on_both_sides():
    job, w0, w1, _ = Job().and_members()
    job.say(w0, w0.declare("a"))
    wrong = w1.declare("a", shape=[2])
    outbox = dict(job.say(w1, wrong))
    text = "key 'a' is int8[1] on worker 0, but int8[2] on worker 1"
    assert text_of(outbox[w1], "Mismatch") == text
    assert outbox[w0] == wire.Fault(0, "Mismatch", text, number=1)
    assert job.beat(w0) == [wire.Alive()], "told once"


def test_a_key_that_rank_0_will_never_give_is_not_waited_for():
    job, w0, w1, w2, _ = Job(3, 1).and_members()
    early = w1.declare("a")
    job.say(w1, early)
    job.say(w0, w0.leave())
    failures = [m for whom, m in job.tick() if whom is w1]
    assert [reply.seq for reply in failures] == [early.seq]
    assert "worker 0 has left the job" in text_of(failures[0], "NodeLost")
    assert "worker 0 has left the job" in text_of(job.reply(w2, w2.declare("a")), "NodeLost")


@pytest.mark.parametrize(
    "message",
    [
        wire.Open(sender(1), store=0, mode="sync"),
        wire.Ready(sender(1), store=0, keys=["a"]),
        wire.Barrier(sender(role="server"), store=0, number=1),
        wire.Declare(
            sender(role="server"), store=0, keys=["a"], kinds=[0], shapes=[[1]], dtypes=["int8"], bound=1, longest=2**40
        ),
    ],
)
def test_what_a_member_may_not_ask_is_refused(message: Any):
    job = Job()
    member = job.workers[1] if message.node.role == "worker" else job.servers[0]
    text = text_of(job.reply(member, message), "UsageError")
    assert text.startswith(f"the scheduler does not handle a {type(message).__name__} of {message.node.role}")


def test_strangers_are_refused_and_fence_nobody():
    job, w0, w1, _ = Job().and_members()
    for message in (
        wire.Barrier(sender(incarnation=2**62), store=0, number=1),
        wire.Barrier(sender(5), store=0, number=1),
        wire.Leave(sender(role="launcher"), error="boo"),
        wire.Leave(sender(incarnation=9), error="boo"),
    ):
        ((whom, reply),) = job.handle(b"stranger", message)
        assert whom == b"stranger"
        assert text_of(reply, "UsageError").endswith("is not a member of this job")
    assert len(job.scheduler.ledger) == 0
    barrier = w0.barrier()
    assert job.say(w0, barrier) == []
    assert len(job.say(w1, w1.barrier())) == 2
    assert job.scheduler.failure is None


def test_before_all_have_joined_nobody_is_a_member():
    job = Job(start=False)
    w0 = job.workers[0]
    job.say(w0, w0.join())
    assert "is not a member" in text_of(job.reply(w0, w0.barrier()), "UsageError")


@pytest.mark.parametrize("message", [wire.Ack(1), wire.Alive(), wire.Stop(), wire.Roster(1, []), wire.JobFailed("x")])
def test_what_is_no_request_is_dropped(message: wire.Message):
    job = Job()
    assert job.handle(b"x", message) == []
    assert job.scheduler.failure is None


def test_members_are_welcomed_together_and_those_that_ask_again_where_they_have_asked_last(
    caplog: pytest.LogCaptureFixture,
):
    sent: dict[bytes, list[wire.Message]] = defaultdict(list)

    def tell(peer: bytes, message: wire.Message) -> None:
        sent[peer].append(message)

    members = Members(1, 1, 1.0)
    joining = JoinRequests(members, ReplyLinks(), Failover(members, tell), tell)
    worker, server = Member("worker", 1, 0), Member("server", 2, 0)
    joining.join(worker.peer, worker.join(), 0.0)
    joining.remind(0.0)
    joining.remind(REMIND_S)
    assert caplog.messages == ["the scheduler waits for server 0 to join"]
    joining.join(b"another link", worker.join(), 1.0)
    assert not sent
    joining.join(server.peer, server.join(), 2.0)
    assert {peer: [type(message) for message in messages] for peer, messages in sent.items()} == {
        b"another link": [wire.Welcome],
        server.peer: [wire.Welcome],
    }
    joining.join(worker.peer, worker.join(), 3.0)
    assert sent[worker.peer] == sent[b"another link"]
    with pytest.raises(UsageError, match="the job has its 1 servers already"):
        joining.join(b"late", Member("server", 3, 0).join(), 4.0)
    assert joining.predecessor(b"late", server.again().join()) is None, "without replicas nobody is started again"


def test_workers_leave_and_servers_are_told_when_to_stop():
    job, w0, w1, s0, s1 = Job(2, 2).and_members()
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
    job, w0, w1, s0, a0 = Job(2, 1, aggregated=[[0, 1]]).and_members()
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
    job, _, w1, _ = Job().and_members()
    leave = w1.leave()
    job.say(w1, leave)
    assert job.reply(w1, leave) == wire.Ack(leave.seq)
    other = w1.leave("with an error, this time")
    assert job.reply(w1, other) == wire.Ack(other.seq)
    assert job.scheduler.failure is None


def test_a_worker_that_leaves_with_an_error_ends_the_job():
    job, w0, w1, s0 = Job().and_members()
    leave = w1.leave("ValueError: bad data")
    text = "worker 1 failed: ValueError: bad data"
    assert job.say(w1, leave) == [(w1, wire.Ack(leave.seq)), (w0, wire.JobFailed(text)), (s0, wire.JobFailed(text))]
    assert text_of(job.reply(w0, w0.barrier()), "NodeLost") == text


def test_a_long_error_still_reaches_everybody():
    job, w0, w1, s0 = Job().and_members()
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
    job, _, w1, s0 = Job().and_members()
    text = "worker 0 was killed by SIGKILL"
    assert job.handle(b"launcher", wire.Lost("worker", 0, "was killed by SIGKILL")) == [
        (w1, wire.JobFailed(text)),
        (s0, wire.JobFailed(text)),
    ]
    assert job.handle(b"launcher", wire.Lost("worker", 0, "was killed by SIGKILL")) == []
    assert job.handle(b"launcher", wire.Lost("worker", 1, "exited with 1")) == []
    assert job.scheduler.failure == text, "the first one counts"


def test_a_worker_that_left_and_then_failed_has_failed():
    job, w0, w1, s0 = Job().and_members()
    job.say(w0, w0.leave())
    assert job.handle(b"launcher", wire.Lost("worker", 0, "exited with 3")) == [
        (w1, wire.JobFailed("worker 0 exited with 3")),
        (s0, wire.JobFailed("worker 0 exited with 3")),
    ]


def test_those_who_wait_for_who_has_left_are_told_after_its_farewell():
    job, w0, w1, s0 = Job(2, 1, farewell_s=1.0).and_members()
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
    job, w0, w1, s0 = Job(2, 1, farewell_s=5.0).and_members()
    job.say(w0, w0.leave())
    assert (s0, wire.Stop()) in job.say(w1, w1.leave())


def test_a_death_before_all_have_joined_is_told_to_those_who_wait():
    job, w0, w1, s0 = Job(2, 1, start=False).and_members()
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
    job, w0, w1, _ = Job(2, 1, start=False).and_members()
    job.say(w0, w0.join())
    job.say(w1, w1.join())
    assert [whom for whom, _ in job.handle(b"launcher", wire.Lost("worker", 1, "was killed"))] == [w0]


def test_after_a_failure_it_stays_until_all_have_gone_or_the_limit_is_over():
    job, w0, s0 = Job(1, 1).and_members()
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
    job, w0, _, _ = Job().and_members()
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
