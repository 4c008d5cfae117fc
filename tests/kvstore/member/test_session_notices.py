"""What a session does with notices of the scheduler, which the test plays: servers elsewhere, faults, views."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from inproc import InprocNetwork
from waiting import LONG, until

from kvstore import wire
from kvstore.errors import (
    Mismatch,
)
from kvstore.job.config import Config
from kvstore.member.outstanding import Question
from kvstore.member.session import Session
from kvstore.ticket import Operation


class Far:
    """The scheduler and the servers of a session, played by the test, whose one thread lets all of them speak."""

    def __init__(self, role: str = "worker") -> None:
        network = InprocNetwork()
        self.ends = {name: network.transport() for name in ("scheduler", "old", "new")}
        for name, end in self.ends.items():
            end.bind(f"inproc://{name}")
        self.notices: list[wire.Message] = []
        config = Config(role, "inproc://scheduler", 1, 1, heartbeat_s=LONG / 10, heartbeat_timeout_s=LONG, start=4)
        self.session = Session(config, network.transport, on_notice=self.notices.append)
        self.joined: list[Any] = []
        self.beating = b""

    def __enter__(self) -> Far:
        joining = threading.Thread(target=self.session.join)
        joining.start()
        peer, join = self.hear("scheduler")
        self.joined.append(join)
        self.ends["scheduler"].send(peer, wire.encode(wire.Welcome(join.seq, 0, 1, 1, ["inproc://old"])))
        joining.join(LONG)
        self.beating, beat = self.hear("scheduler")
        assert isinstance(beat, wire.Beat)
        return self

    def __exit__(self, *_: object) -> None:
        self.session.give_up("over")

    def hear(self, name: str) -> tuple[bytes, Any]:
        received = self.ends[name].recv(LONG)
        assert received is not None
        return received[0], wire.decode(received[1])

    def tell(self, *notices: wire.Message) -> None:
        """Let notices come, and return when they have been taken."""
        for notice in notices:
            self.ends["scheduler"].send(self.beating, wire.encode(notice))
        self.ends["scheduler"].send(self.beating, wire.encode(wire.Roster(1, [])))
        until(lambda: bool(self.notices) and isinstance(self.notices[-1], wire.Roster))
        self.notices.pop()


def test_a_worker_asks_a_server_where_it_is_now_and_counts_takeovers():
    with Far() as far:
        assert far.joined[0].start == 4
        operation = Operation("x", (), far.session.client)
        question = Question(far.session.servers[0], operation, wire.Census, {}, operation.take)
        far.session.client.ask(operation, question)
        assert [type(far.hear("old")[1]) for _ in range(2)] == [wire.Here, wire.Census]
        answering = threading.Thread(target=operation.wait)  # the wait is where the links are used
        answering.start()
        far.tell(
            wire.Moved(0, 3, "inproc://new"),
            wire.Moved(0, 3, "inproc://new"),
            wire.Moved(0, 2, "inproc://old"),
            wire.Moved(9, 1, "x"),
        )
        assert far.notices == [wire.Moved(0, 3, "inproc://new")], "the others are old, or of no server"
        (_, here), (peer, asked) = far.hear("new"), far.hear("new")
        assert (type(here), type(asked)) == (wire.Here, wire.Census)
        far.ends["new"].send(peer, wire.encode(wire.Counted(asked.seq, 5)))
        answering.join(LONG)
        assert operation.wait() == wire.Counted(asked.seq, 5)
        assert (far.session.takeovers, far.session.addresses) == (1, ["inproc://new"])


def test_a_fault_that_is_told_again_is_raised_once():
    """A scheduler that was started again tells all faults again."""
    with Far() as far:
        faults = [wire.Fault(0, "Mismatch", f"key {number}", number) for number in (1, 2)]
        far.tell(*faults, *faults)
        for number in (1, 2):
            with pytest.raises(Mismatch, match=f"key {number}"):
                far.session.check(0)
        far.session.check(0)


def test_a_server_reports_over_the_link_of_its_beats_and_is_told_of_views():
    with Far("server") as far:
        standing = wire.Standing(far.session.client.node, 1, 12, synced=True)
        far.session.report(standing)
        assert far.hear("scheduler") == (far.beating, standing)
        view = wire.View(wire.Node("server", 0, 1), 2)
        far.tell(view)
        assert far.notices == [view]
