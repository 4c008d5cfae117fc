"""How a loss is learned of, by itself; whole jobs that lose members are in test_core and test_failover."""

from __future__ import annotations

from asking import Door

from kvstore import wire
from servers.requests.reply_links import ReplyLinks
from servers.scheduler.failover import Failover
from servers.scheduler.failure import JobFailure, Losses
from servers.scheduler.members import JobMember, Members, MemberState


class Case:
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
    case = Case()
    w0 = case.everyone[0]
    case.losses.report(b"worker 1", wire.Lost("worker", 0, "was killed"), 1.0)
    assert (case.failure.text, w0.state) == (None, MemberState.READY), "it has another member's key"
    for now in (1.0, 2.0):
        case.losses.report(b"launcher", wire.Lost("worker", 0, "was killed"), now)
    assert (case.failure.text, case.failure.at, w0.state) == ("worker 0 was killed", 1.0, MemberState.LOST)


def test_silence_fails_the_job_by_name():
    case = Case()
    case.losses.silent(case.everyone[2], 2.5)
    assert case.failure.text == "server 0 is lost: it has been silent for 2.5 s"
