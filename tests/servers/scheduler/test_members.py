"""Members of a job: who they are, heartbeats that keep them alive, and the failure of one."""

from __future__ import annotations

import itertools

import pytest
from asking import Door
from rendezvous import LIMIT, Job

from kvstore import wire
from kvstore.errors import NodeLost, UsageError
from servers.requests.reply_links import ReplyLinks
from servers.scheduler.departures import Departures, Rosters
from servers.scheduler.failover import Failover
from servers.scheduler.losses import JobFailure, Losses
from servers.scheduler.members import NEXT, JobMember, MemberEvent, Members, MemberState, Welcomes

# ---- members


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
    ends = {before for before, _ in NEXT} - {MemberState.JOINED, MemberState.READY}
    assert {(before, event) for before, event in NEXT if before in ends} == {(MemberState.LEFT, MemberEvent.FAILS)}
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


# ---- heartbeats: which members they keep alive, and what is said in return


def test_a_beat_keeps_a_member_alive():
    job = Job()
    for _ in range(20):
        assert job.tick(LIMIT / 2) == []
        for member in job.everyone:
            assert job.beat(member) == [wire.Alive()]
    assert job.scheduler.failure is None


def test_a_pulse_keeps_a_member_alive_and_is_not_answered():
    """Its process is there, though its interpreter has no time for a beat; notices go over the link of its beats."""
    job, w0, w1, s0 = Job().and_members()
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
    job, w0, _, s0 = Job().and_members()
    assert job.tick(LIMIT * 0.75) == []
    job.beat(w0)
    job.beat(s0)
    text = "worker 1 is lost: it has been silent for 12.5 s"
    assert job.tick(LIMIT * 0.5) == [(w0, wire.JobFailed(text)), (s0, wire.JobFailed(text))]
    assert job.tick(LIMIT * 0.5) == [], "once"
    assert job.beat(w0) == [wire.JobFailed(text), wire.Alive()], "but each beat is told again"


def test_a_server_that_falls_silent_is_named():
    job, w0, w1, _ = Job().and_members()
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
    job, _, w1, _ = Job().and_members()
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
    job, w0, w1, s0 = Job(2, 1, start=False).and_members()
    for member in job.everyone:
        job.say(member, member.join())
        member.incarnation = 1
    job.say(w1, w1.leave())
    assert job.tick() == []
    assert job.beat(s0) == [wire.Alive(), wire.Roster(1, [1])]
    assert job.beat(w0) == [wire.Alive()]


def test_a_server_is_told_again_who_has_left_when_its_link_has_been_made_anew():
    job, w0, w1, _, s0 = Job(3, 1).and_members()
    job.say(w1, w1.leave())
    job.tick()
    assert job.beat(s0) == [wire.Alive()]
    s0.beats = b"made anew"
    assert job.beat(s0) == [wire.Alive(), wire.Roster(1, [1])]
    assert job.beat(s0) == [wire.Alive()]
    job.say(w0, w0.leave())
    assert job.tick() == [(s0, wire.Roster(2, [0, 1]))]


def test_rank_0_that_has_not_beaten_yet_learns_of_a_contradiction_at_its_first_beat():
    job, w0, w1, _ = Job(2, 1, start=False).and_members()
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
    departures = Departures(0.0)
    departures.known |= {3, 1}
    rosters.change(departures, over=False)
    rosters.inform(member)
    assert sent == [], "it has not beaten yet"
    member.peer = b"beats"
    for _ in range(2):
        rosters.inform(member)
    assert sent == [wire.Roster(1, [1, 3])]
    rosters.change(departures, over=True)
    for _ in range(2):
        rosters.inform(member)
    assert (sent[1:], rosters.over) == ([wire.Stop(), wire.Stop()], True)


# ---- the failure of a job by itself; what follows of it is in test_core.py


class Case:
    """A job of two workers and a server, and who is told what."""

    def __init__(self) -> None:
        self.told: list[tuple[bytes, wire.Message]] = []
        self.events: list[tuple[float, str]] = []
        self.members = Members(2, 1, 1.0)
        self.failure = JobFailure(
            self.members,
            lambda peer, message: self.told.append((peer, message)),
            lambda now, line: self.events.append((now, line)),
        )

    def join(self, role: str, nonce: int) -> JobMember:
        member = JobMember(role, nonce, -1, "here", b"joins %d" % nonce, 10 + nonce)
        self.members.join(member)
        return member


def test_the_first_cause_is_told_to_who_is_still_there():
    case = Case()
    w0, w1, s0 = (case.join(role, n) for n, role in enumerate(["worker", "worker", "server"]))
    case.members.settle(0.0)
    w0.peer, s0.peer = b"beats 0", b"beats 2"  # the other has not beaten yet, and hears it then
    case.failure.check()
    case.failure.happen("worker 1 was killed", 3.0)
    case.failure.happen("worker 0 failed, too", 4.0)
    assert (case.failure.text, case.failure.at) == ("worker 1 was killed", 3.0)
    assert case.told == [
        (b"beats 0", wire.JobFailed("worker 1 was killed")),
        (b"beats 2", wire.JobFailed("worker 1 was killed")),
    ]
    assert case.events == [(3.0, "the job has failed: worker 1 was killed")]
    assert w1.state is MemberState.READY
    with pytest.raises(NodeLost, match="worker 1 was killed"):
        case.failure.check()


def test_who_waits_to_join_gets_the_reason_as_its_answer_and_is_gone():
    case = Case()
    member = case.join("worker", 1)
    case.failure.happen("a long story" * wire.MAX_REASON, 3.0)
    assert case.failure.text is not None
    assert len(case.failure.text) == len(case.events[0][1]) == wire.MAX_REASON
    ((peer, reply),) = case.told
    assert isinstance(reply, wire.Failure)
    assert (peer, reply.seq, reply.kind, reply.text) == (b"joins 1", 11, "NodeLost", case.failure.text)
    assert (member.state, case.members.present) == (MemberState.LEFT, 0)


class Losing:
    """A job of two workers and a server, which prove keys, and which have not beaten yet."""

    def __init__(self) -> None:
        def tell(peer: bytes, message: wire.Message) -> None:
            raise AssertionError("there are no views without replicas")

        members = Members(2, 1, 1.0)
        self.everyone = [
            JobMember(role, n, -1, "", b"", 1, f"key {n}") for n, role in enumerate(["worker", "worker", "server"])
        ]
        for member in self.everyone:
            members.join(member)
        members.settle(0.0)
        links = ReplyLinks(Door({b"launcher": "root", b"worker 1": "key 1"}))
        self.without: list[int] = []
        self.failure = JobFailure(members, tell, lambda now, line: None)
        self.losses = Losses(
            *(members, links, Failover(members, tell), "root", self.failure, 0, self.without.append), Departures(0.0)
        )


def test_reports_fail_the_job_by_name_and_only_the_launcher_may_report():
    case = Losing()
    w0 = case.everyone[0]
    case.losses.report(b"worker 1", wire.Lost("worker", 0, "was killed"), 1.0)
    assert (case.failure.text, w0.state) == (None, MemberState.READY), "it has another member's key"
    for now in (1.0, 2.0):
        case.losses.report(b"launcher", wire.Lost("worker", 0, "was killed"), now)
    assert (case.failure.text, case.failure.at, w0.state) == ("worker 0 was killed", 1.0, MemberState.LOST)


def test_silence_fails_the_job_by_name():
    case = Losing()
    case.losses.silent(case.everyone[2], 2.5)
    assert case.failure.text == "server 0 is lost: it has been silent for 2.5 s"
