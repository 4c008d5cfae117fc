from __future__ import annotations

import itertools

import pytest

from kvstore import wire
from kvstore.errors import UsageError
from servers.scheduler.members import NEXT, JobMember, MemberEvent, Members, MemberState, Welcomes


def member(role: str = "worker", nonce: int = 1, hint: int = -1) -> JobMember:
    return JobMember(role, nonce, hint, address=f"at {nonce}", join_peer=b"j%d" % nonce, join_seq=1)


@pytest.mark.parametrize(("state", "event"), list(itertools.product(MemberState, MemberEvent)))
def test_every_pair_does_what_the_table_says_and_a_missing_one_nothing(state: MemberState, event: MemberEvent):
    members, one = Members(1, 1, 1.0), member()
    members.join(one)
    one.state = state
    assert members.happens(one, event) is ((state, event) in NEXT)
    assert one.state is NEXT.get((state, event), state)


@pytest.mark.parametrize(
    ("hints", "ranks"),
    [
        ([-1, -1, -1], [0, 1, 2]),
        ([2, 1, 0], [2, 1, 0]),
        ([-1, 0, -1], [1, 0, 2]),
        ([1, 1, 1], [1, 0, 2]),
        ([7, -1, 0], [1, 2, 0]),
    ],
)
def test_ranks_are_those_asked_for_and_then_in_the_order_of_coming(hints: list[int], ranks: list[int]):
    members = Members(3, 1, 1.0)
    for nonce, hint in enumerate(hints):
        members.join(member(nonce=nonce, hint=hint))
    assert not members.settle(0.0)
    members.join(member("server", 99))
    assert members.settle(5.0)
    assert [m.rank for m in members.everyone if m.role == "worker"] == ranks
    assert {(m.incarnation, m.heard, m.state) for m in members.everyone} == {(1, 5.0, MemberState.READY)}
    assert not members.settle(6.0), "ranks are given once"
    assert [m.rank for m in members.of("worker")] == [0, 1, 2]


@pytest.mark.parametrize("role", ["worker", "server", "aggregator"])
def test_nobody_joins_a_full_job(role: str):
    members = Members(1, 1, 1.0, 1)
    members.join(member(role, 1))
    with pytest.raises(UsageError, match=f"the job has its 1 {role}s already"):
        members.join(member(role, 2))
    assert len(members.everyone) == 1


@pytest.mark.parametrize("role", ["scheduler", "launcher"])
def test_only_workers_servers_and_aggregators_join(role: str):
    with pytest.raises(UsageError, match=f"a {role} does not"):
        Members(1, 1, 1.0).join(member(role))


def test_the_absent_are_named_where_their_names_are_known():
    members = Members(3, 2, 1.0)
    members.join(member(nonce=1, hint=1))
    assert members.absent() == "worker 0, worker 2 and server 0, server 1"
    members.join(member(nonce=2, hint=-1))
    assert members.absent() == "1 of 3 workers and server 0, server 1"
    members.join(member(nonce=3, hint=0))
    assert members.absent() == "server 0, server 1"
    assert Members(1, 1, 1.0, 2).absent() == "worker 0 and server 0 and aggregator 0, aggregator 1"


def test_a_job_waits_for_its_aggregators():
    members = Members(1, 1, 1.0, 1)
    for nonce, role in enumerate(["worker", "server"]):
        members.join(member(role, nonce))
    assert not members.settle(0.0)
    members.join(member("aggregator", 9))
    assert members.settle(0.0)
    assert [one.node for one in members.of("aggregator")] == [wire.Node("aggregator", 0, 1)]


@pytest.mark.parametrize("hint", [1, 3, 4096])
def test_the_absent_are_counted_where_it_is_not_known_who_will_have_which_rank(hint: int):
    members = Members(3, 1, 1.0)
    members.join(member(nonce=1, hint=1))
    twin = member(nonce=2, hint=hint)
    members.join(twin)
    members.join(member("server", 3, 0))
    assert members.absent() == "1 of 3 workers"
    members.withdraw(twin)
    assert members.absent() == "worker 0, worker 2"


def test_a_few_of_many_absent_are_named():
    members = Members(20, 1, 1.0)
    assert members.absent() == ", ".join(f"worker {rank}" for rank in range(8)) + " and 12 more and server 0"


def test_silence_counts_for_ready_members_only():
    members = Members(2, 1, 2.0)
    for nonce, role in enumerate(["worker", "worker", "server"]):
        members.join(member(role, nonce))
    assert members.overdue(100.0) == [], "nobody is lost before all have come"
    members.settle(100.0)
    first, second, server = members.everyone
    members.hear(first, 101.5)
    members.happens(second, MemberEvent.LEAVES)
    assert members.overdue(102.0) == []
    assert members.overdue(102.5) == [server]
    members.forgive(103.0)
    assert members.overdue(105.0) == []
    assert members.overdue(105.5) == [server, first], "who has been silent for longest comes first"


def test_who_is_heard_again_is_not_overdue_and_who_is_lost_or_has_left_is_not_looked_for():
    members = Members(3, 1, 2.0)
    for nonce, role in enumerate(["worker", "worker", "worker", "server"]):
        members.join(member(role, nonce))
    members.settle(0.0)
    first, second, third, server = members.everyone
    members.hear(first, 1.5)
    members.happens(second, MemberEvent.DIES)
    members.hear(second, 3.0)
    members.happens(server, MemberEvent.LEAVES)
    assert members.overdue(3.0) == [third]
    members.happens(third, MemberEvent.DIES)
    assert members.overdue(3.0) == []
    assert members.overdue(4.0) == [first]


def test_find_goes_by_the_rank_asked_for_until_ranks_are_given():
    members = Members(2, 1, 1.0)
    members.join(member(nonce=1, hint=1))
    members.join(member(nonce=2, hint=1))
    found = members.find("worker", 1)
    assert found is not None
    assert found.nonce == 1
    assert members.find("worker", 0) is None
    assert members.identify(wire.Node("worker", -1, 0)) is members.identify(wire.Node("worker", 1, 0)) is None
    assert members.of("worker") == []
    members.join(member("server", 3))
    members.settle(0.0)
    found = members.find("worker", 0)
    assert found is not None
    assert found.nonce == 2
    assert members.identify(wire.Node("worker", 0, 1)) is found
    assert members.identify(wire.Node("worker", 0, 2)) is members.identify(wire.Node("server", 1, 1)) is None


def test_all_gone_needs_all_to_have_come():
    members = Members(2, 1, 1.0)
    one = member(nonce=1)
    members.join(one)
    members.happens(one, MemberEvent.DIES)
    assert not members.all_gone("worker")
    two = member(nonce=2)
    members.join(two)
    assert not members.all_gone("worker")
    members.happens(two, MemberEvent.LEAVES)
    assert members.all_gone("worker")
    assert (len(members), members.present, members.lost) == (2, 0, 1)


def test_members_are_counted_through_all_that_happens_to_them():
    members = Members(2, 1, 1.0)
    everyone = [member(nonce=1), member(nonce=2), member("server", 3)]
    hasty = member(nonce=9)
    members.join(hasty)
    members.withdraw(hasty)
    for one in everyone:
        members.join(one)
    members.settle(0.0)
    assert (len(members), members.present, members.lost) == (3, 3, 0)
    for event in (MemberEvent.DIES, MemberEvent.LEAVES, MemberEvent.ALL_HERE):
        members.happens(everyone[0], event)
        assert (len(members), members.present, members.lost) == (3, 2, 1)
    members.happens(everyone[2], MemberEvent.LEAVES)
    assert (members.present, members.all_gone("server"), members.all_gone("worker")) == (1, True, False)


def test_nothing_follows_the_end():
    assert {before for before, _ in NEXT} == {MemberState.JOINED, MemberState.READY}
    assert NEXT[MemberState.READY, MemberEvent.LEAVES] is MemberState.LEFT
    assert NEXT[MemberState.READY, MemberEvent.DIES] is MemberState.LOST


def test_a_member_is_named_by_its_role_rank_and_start():
    member = JobMember("server", nonce=7, hint=1, address="at 7", join_peer=b"j7", join_seq=1)
    assert (member.node, member.state) == (wire.Node("server", -1, 0), MemberState.JOINED)
    member.rank, member.incarnation = 1, 2
    assert member.node == wire.Node("server", 1, 2)


def test_a_welcome_says_where_servers_are_now_and_is_not_changed_afterwards():
    members = Members(1, 2, 1.0)
    for nonce, role in enumerate(["worker", "server", "server"]):
        members.join(JobMember(role, nonce, -1, f"at {nonce}", b"link", nonce, f"key {nonce}"))
    members.settle(0.0)
    welcomes = Welcomes(members)
    worker, server, _ = members.everyone
    before = welcomes.of(worker)
    assert (before.seq, before.rank, before.num_workers, before.servers) == (0, 0, 1, ["at 1", "at 2"])
    assert (before.worker_keys, welcomes.of(server).worker_keys) == ([], ["key 0"]), "keys are for servers"
    welcomes.servers[1] = "elsewhere"
    assert welcomes.of(worker).servers == ["at 1", "elsewhere"]
    assert before.servers == ["at 1", "at 2"]
