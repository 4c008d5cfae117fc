"""A reader's links, to a scheduler and servers that are functions, with a clock that moves while nothing comes."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvstore import wire
from kvstore.errors import DeadlineExceeded, NodeLost, UsageError
from kvstore.job.config import Config
from kvstore.reading.reader_session import FRESH_S, ReaderSession

ROOT = "tcp://10.0.0.1:5555"
READ = {"store": 0, "ids": [], "lineage": 0, "versions": [], "slack": 0}


class Played:
    """A transport whose peers answer at once, or not at all."""

    def __init__(self) -> None:
        self.now = 0.0
        self.servers = ["server-0", "server-1"]
        self.scheduler: Callable[[Any], wire.Message | None] = lambda asked: wire.Connected(asked.seq, 3, self.servers)
        self.dead: set[str] = set()
        self.asked: list[tuple[str, Any]] = []
        self._inbox: deque[tuple[bytes, list[Any]]] = deque()

    def connect(self, endpoint: str, *, bulk: bool = False) -> bytes:
        return endpoint.encode()

    def disconnect(self, peer: bytes) -> None:
        """Nothing comes over it any more."""

    def send(self, peer: bytes, frames: Sequence[Any], priority: int | None = None) -> None:
        request = wire.decode(frames)
        self.asked.append((peer.decode(), request))
        answer: wire.Message | None = None
        if isinstance(request, wire.Connect):
            answer = self.scheduler(request)
        elif isinstance(request, wire.ReadValues) and peer.decode() not in self.dead:
            answer = wire.ValuesRead(request.seq, 0, [], [])
        if answer is not None:
            self._inbox.append((peer, wire.encode(answer)))

    def recv(self, timeout: float) -> tuple[bytes, list[Any]] | None:
        if self._inbox:
            return self._inbox.popleft()
        self.now += timeout
        return None

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def interrupt(self) -> None: ...

    def detach(self) -> None: ...

    def abandon(self) -> None: ...

    def close(self, linger: float = 0.0) -> None: ...


def session_of(transport: Any, listens: bool | None = True, root: str = ROOT) -> ReaderSession:
    config = dataclasses.replace(Config(), role="reader", root=root)
    clock = lambda: transport.now  # noqa: E731
    return ReaderSession(config, lambda: transport, 30.0, clock, lambda _: listens, transport.sleep)


def connected(transport: Any, listens: bool | None = True, root: str = ROOT) -> ReaderSession:
    session = session_of(transport, listens, root)
    session.connect()
    session.link()
    return session


def read(session: ReaderSession, timeout: float = 30.0) -> list[Any]:
    taken: list[Any] = []
    asks: Any = [(server, wire.ReadValues, READ, taken.append) for server in range(session.num_servers)]
    session.ask("pull", ["w"], asks, session.deadline(timeout))
    return taken


def test_a_reader_finds_the_servers_and_says_who_it_is() -> None:
    transport = Played()
    assert len(read(connected(transport))) == 2
    assert [str(asked.node) for peer, asked in transport.asked if isinstance(asked, wire.Here)] == [
        "reader 3",
        "reader 3",
    ]


def test_it_waits_until_all_members_have_joined() -> None:
    transport, tries = Played(), []

    def scheduler(asked: Any) -> wire.Message:
        tries.append(asked)
        return wire.Connected(asked.seq, 0, transport.servers if len(tries) > 2 else [])

    transport.scheduler = scheduler
    assert connected(transport).num_servers == 2


def test_a_server_that_was_replaced_is_found_again() -> None:
    transport = Played()
    session = connected(transport)
    transport.dead.add("server-1")
    transport.servers = ["server-0", "standby-1"]
    assert len(read(session)) == 2
    assert transport.asked[-1][0] == "standby-1"


def test_a_server_that_does_not_answer_is_named() -> None:
    transport = Played()
    session = connected(transport)
    transport.dead.add("server-1")
    with pytest.raises(DeadlineExceeded, match="no answer from server 1") as late:
        read(session, 5.0)
    assert late.value.silent == ("server 1",)
    assert transport.now == pytest.approx(5.0)


def test_why_the_job_is_over_is_told() -> None:
    transport = Played()
    session = connected(transport)
    transport.dead |= {"server-0", "server-1"}
    transport.scheduler = lambda asked: wire.Failure(asked.seq, "NodeLost", "worker 1 was killed")
    with pytest.raises(NodeLost, match="worker 1 was killed"):
        read(session)


def test_a_job_whose_scheduler_is_gone_has_ended() -> None:
    transport = Played()
    session = connected(transport, listens=False)
    transport.dead |= {"server-0", "server-1"}
    transport.scheduler = lambda _: None
    with pytest.raises(NodeLost, match="has ended"):
        read(session)
    assert 5.0 < transport.now < 10.0


def test_where_the_directory_is_gone_nobody_comes_back(tmp_path: Path) -> None:
    transport = Played()
    session = connected(transport, listens=False, root=f"ipc://{tmp_path}/gone/scheduler")
    transport.dead |= {"server-0", "server-1"}
    transport.scheduler = lambda _: None
    with pytest.raises(NodeLost, match="has ended"):
        read(session)
    assert transport.now < 5.0


def test_a_scheduler_that_is_away_for_a_while_is_waited_for() -> None:
    transport = Played()
    session = connected(transport, listens=None)
    transport.dead.add("server-1")
    transport.scheduler = lambda _: None
    with pytest.raises(DeadlineExceeded):
        read(session)


def test_now_and_then_the_scheduler_hears_of_a_reader() -> None:
    transport = Played()
    session = connected(transport)
    read(session)
    transport.now += FRESH_S + 1
    read(session)
    assert len([asked for _, asked in transport.asked if isinstance(asked, wire.Connect)]) == 2


def test_a_refusal_is_raised_at_once() -> None:
    transport = Played()
    transport.scheduler = lambda asked: wire.Failure(asked.seq, "UsageError", "the job has its 1 readers already")
    with pytest.raises(UsageError, match="1 readers already"):
        connected(transport)
    assert transport.now == 0.0


@pytest.mark.parametrize(("listens", "why"), [(False, "nobody listens"), (True, "is the key this job's")])
def test_without_an_answer_it_is_said_what_may_be_wrong(listens: bool, why: str) -> None:
    transport = Played()
    transport.scheduler = lambda _: None
    with pytest.raises(DeadlineExceeded, match=why):
        connected(transport, listens)
    assert transport.now == pytest.approx(30.0)


def test_a_job_that_does_not_begin_is_not_waited_for_without_end() -> None:
    transport = Played()
    transport.servers = []
    with pytest.raises(DeadlineExceeded, match="not all its members have joined"):
        connected(transport)
