"""Joining by itself; whole jobs that join are in test_core and test_failover."""

from __future__ import annotations

from collections import defaultdict

import pytest
from rendezvous import Member

from kvstore import wire
from kvstore.errors import UsageError
from servers.requests.reply_links import ReplyLinks
from servers.scheduler.core import REMIND_S, JoinRequests
from servers.scheduler.failover import Failover
from servers.scheduler.members import Members


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
