"""How a loss is learned of, by itself; whole jobs that lose members are in test_core and test_failover."""

from __future__ import annotations

from asking import Door

from kvstore.wire import Lost, Message
from servers.requests.reply_links import ReplyLinks
from servers.scheduler.failover import Failover
from servers.scheduler.losses import Losses
from servers.scheduler.member import JobMember, MemberState
from servers.scheduler.members import Members


def test_reports_and_silence_fail_the_job_by_name_and_only_the_launcher_may_report():
    def tell(peer: bytes, message: Message) -> None:
        raise AssertionError("there are no views without replicas")

    reasons: list[str] = []
    members = Members(2, 1, 1.0)
    everyone = [JobMember(role, n, -1, "", b"", 1, f"key {n}") for n, role in enumerate(["worker", "worker", "server"])]
    for member in everyone:
        members.join(member)
    members.settle(0.0)
    links = ReplyLinks(Door({b"launcher": "root", b"worker 1": "key 1"}))
    losses = Losses(members, links, Failover(members, tell), "root", reasons.append, lambda: bool(reasons))
    losses.report(b"worker 1", Lost("worker", 0, "was killed"), 1.0)
    assert (reasons, everyone[0].state) == ([], MemberState.READY), "it has another member's key"
    for _ in range(2):
        losses.report(b"launcher", Lost("worker", 0, "was killed"), 1.0)
    assert (reasons, everyone[0].state) == (["worker 0 was killed"], MemberState.LOST)
    losses.silent(everyone[2], 2.5)
    assert reasons[1:] == ["server 0 is lost: it has been silent for 2.5 s"]
