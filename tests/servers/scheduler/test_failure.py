"""The failure of a job by itself; what follows of it is in test_core."""

from __future__ import annotations

import pytest
from asking import Door

from kvstore import wire
from kvstore.errors import NodeLost
from servers.requests.reply_links import ReplyLinks
from servers.scheduler.failover import Failover
from servers.scheduler.losses import JobFailure, Losses
from servers.scheduler.members import JobMember, Members, MemberState


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
        self.failure = JobFailure(members, tell, lambda now, line: None)
        self.losses = Losses(members, links, Failover(members, tell), "root", self.failure)


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
