"""An observer of real jobs over each kind of link, and of schedulers that do not answer, with a clock that moves."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from observed_job import ObservedJob

from kvstore import wire
from kvstore.errors import DeadlineExceeded, NodeLost, UsageError
from kvstore.job.config import Config
from kvstore.job.curve_keys import CurveKeys, pair
from kvstore.observing.observer_session import GONE_S, ObserverSession, stacks_in
from kvstore.wire.guests import MOST_EVENTS, MOST_LOCATED

KINDS = ["unix", "tcp", "zeromq", "curve"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_is_seen_and_does_not_wait_for_who_looks(kind: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    directory = tmp_path if kind == "unix" else None
    with ObservedJob(1, 1, kind, directory=directory) as job, job.observe() as observer:
        view, later = observer.look(), observer.look()
    assert {(member.name, member.state) for member in view.members} == {("worker 0", "ready"), ("server 0", "ready")}
    assert [event.text for event in later.events] == ["all 2 members have joined"]
    assert later.at >= view.at >= view.started
    assert job.exit_codes == {"scheduler": 0, "server 0": 0}


def test_another_key_or_another_members_key_sees_nothing() -> None:
    with ObservedJob(1, 1, "curve") as job:
        config = job.config("observer")
        assert config.keys is not None
        stranger = dataclasses.replace(config, keys=CurveKeys.of_observer(pair()[1], config.keys.root))
        with job.observe(0.3, stranger) as observer, pytest.raises(DeadlineExceeded, match="key is another job's"):
            observer.look()
        member = dataclasses.replace(config, keys=job.config("worker", 0).keys)
        with job.observe(config=member) as observer, pytest.raises(UsageError, match="another key than observers have"):
            observer.look()
        with job.observe() as observer:
            assert len(observer.look().members) == 2


# ---- without a job

ROOT = "tcp://10.0.0.1:5555"


class Played:
    """A transport to a scheduler that is a function, with a clock that moves while nothing comes."""

    def __init__(self, events: Sequence[str] | None = None) -> None:
        self.now = 0.0
        self.first = 1
        self.events = events
        self.asked: list[Any] = []
        self.inbox: list[Any] = []

    def connect(self, endpoint: str, *, bulk: bool = False) -> bytes:
        return endpoint.encode()

    def disconnect(self, peer: bytes) -> None:
        """Nothing comes over it any more."""

    def send(self, peer: bytes, frames: Sequence[Any], priority: int | None = None) -> None:
        request = wire.decode(frames)
        self.asked.append(request)
        if self.events is None:
            return
        if isinstance(request, wire.Observe):
            skipped = max(0, request.after + 1 - self.first) if request.after < self.first + len(self.events) else 0
            lines = [[0.0, line] for line in self.events[skipped:]]
            first = self.first + skipped
            reply: Any = wire.Observed(request.seq, 1.0, 0.0, [1, 1, 0, 0], [], None, "", first, lines, [])
            self.inbox.append((peer, wire.encode(reply)))
        elif isinstance(request, wire.Locate):
            places = [f"is at train.py:{rank}" for rank in request.ranks]
            self.inbox.append((peer, wire.encode(wire.Located(request.seq, request.ranks, places))))

    def recv(self, timeout: float) -> Any:
        if self.inbox:
            return self.inbox.pop(0)
        self.now += timeout
        return None

    def interrupt(self) -> None:
        self.inbox.append(None)

    def detach(self) -> None: ...

    def abandon(self) -> None: ...

    def close(self, linger: float = 0.0) -> None: ...


def session_of(transport: Any, listens: bool | None = True) -> ObserverSession:
    config = dataclasses.replace(Config(), role="observer", root=ROOT)
    return ObserverSession(config, 5.0, lambda: transport, lambda: transport.now, lambda _: listens)


def texts(session: ObserverSession) -> list[str]:
    return [event.text for event in session.look().events]


def test_a_scheduler_that_is_stopped_is_waited_for_until_the_deadline() -> None:
    transport = Played()
    with pytest.raises(DeadlineExceeded, match="not answered within 5 s: it is stopped") as late:
        session_of(transport).look()
    assert late.value.silent == ("the scheduler",)
    assert 5.0 <= transport.now < 7.0


def test_where_nobody_listens_the_job_has_ended() -> None:
    transport = Played()
    with pytest.raises(NodeLost, match=r"nobody listens at tcp://10\.0\.0\.1:5555"):
        session_of(transport, listens=False).look()
    assert GONE_S <= transport.now < 5.0


def test_events_are_asked_for_once_and_kept() -> None:
    transport = Played(["a", "b"])
    session = session_of(transport)
    assert texts(session) == ["a", "b"]
    transport.events = ["a", "b", "c"]
    assert texts(session) == ["a", "b", "c"]
    assert [asked.after for asked in transport.asked if isinstance(asked, wire.Observe)] == [0, 2]


def test_a_pause_ends_by_itself_by_word_of_a_death_and_by_who_ends_it() -> None:
    transport = Played(["a"])
    session = session_of(transport)
    session.wait(3.0)
    assert transport.now == 3.0
    transport.inbox.append((ROOT.encode(), wire.encode(wire.Ack(0))))
    session.wait(3.0)
    session.wake()
    session.wait(3.0)
    assert transport.now == 3.0
    transport.inbox.append((ROOT.encode(), wire.encode(wire.Ack(0))))  # once more, while it asks
    assert texts(session) == ["a"]


def test_a_scheduler_that_was_started_again_tells_its_events_anew() -> None:
    transport = Played(["a", "b", "c"])
    session = session_of(transport)
    assert len(texts(session)) == 3
    transport.events = ["A"]
    assert texts(session) == ["A"]


def test_only_the_latest_events_are_kept() -> None:
    transport = Played([str(number) for number in range(MOST_EVENTS)])
    session = session_of(transport)
    session.look()
    transport.first, transport.events = 1 + MOST_EVENTS, ["new"]
    assert texts(session) == [*map(str, range(1, MOST_EVENTS)), "new"]


def test_many_members_are_located_in_several_questions() -> None:
    transport = Played([])
    ranks = range(MOST_LOCATED + 3)
    located = session_of(transport).locate("worker", [*ranks, 0])
    assert (located.ranks, located.places[1]) == (list(ranks), "is at train.py:1")
    assert [len(asked.ranks) for asked in transport.asked if isinstance(asked, wire.Locate)] == [MOST_LOCATED, 3]


def test_stacks_are_read_and_nothing_else_is() -> None:
    stacks = wire.Stacks(
        wire.Node("worker", 0, 1), 1, "train.py:3 in main", "sleeps", [["MainThread", ["train.py:3 in main"]]]
    )
    located = wire.Located(0, [0], ["is at train.py:3 in main"], [bytes(wire.encode(stacks)[0])])
    assert [one.place for one in stacks_in(located)] == ["train.py:3 in main"]
    other = wire.Located(0, [0], [""], [bytes(wire.encode(wire.Beat(wire.Node("worker", 0, 1)))[0])])
    with pytest.raises(Exception, match="expected stacks, got a Beat"):
        list(stacks_in(other))


def test_closing_twice_is_once() -> None:
    transport = Played([])
    session = session_of(transport)
    session.close()
    session.close()
    assert len(transport.asked) == 1
