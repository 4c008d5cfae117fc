"""What a message or a tick costs the scheduler does not depend on how many members there are.

Cost is counted in lines that run, which no load of the machine changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from costs import same, steps

from kvstore import wire
from kvstore.job.settings import MAX_NODES
from servers.scheduler import Scheduler

LIMIT = 10.0
FEW = 64


class Crowd:
    """A scheduler and its members, a quarter of them servers; each says its requests in one go."""

    def __init__(self, members: int, *, start: bool = True, hints: bool = True) -> None:
        self.servers = members // 4
        self.workers = members - self.servers
        self.scheduler = Scheduler(self.workers, self.servers, LIMIT, farewell_s=1.0)
        self.now = 0.0
        self.seq = 1
        self.scheduler.tick(self.now)
        if start:
            for join in self.joins(hints=hints):
                self.say(join)
            self.second()

    def joins(self, *, hints: bool) -> Iterator[wire.Join]:
        for role, number in (("server", self.servers), ("worker", self.workers)):
            for rank in range(number):
                yield wire.Join(
                    wire.Sender(wire.Node(role, rank if hints else -1, (role == "worker") * 2**20 + rank), 1, 0),
                    address="here",
                )

    def say(self, message: Any) -> list[tuple[bytes, wire.Message]]:
        member = message if isinstance(message, wire.Lost) else message.node
        outbox = self.scheduler.handle(b"%s %d" % (member.role.encode(), member.rank), message, self.now)
        assert not self.scheduler.finished
        return outbox

    def beats(self) -> list[wire.Beat]:
        return [wire.Beat(wire.Node("worker", rank, 1)) for rank in range(self.workers)] + [
            wire.Beat(wire.Node("server", rank, 1)) for rank in range(self.servers)
        ]

    def second(self) -> None:
        """One second: two ticks, and a beat of each member."""
        beats = self.beats()
        for half in (beats[::2], beats[1::2]):
            self.now += 0.5
            for beat in half:
                self.say(beat)
            self.scheduler.tick(self.now)

    def me(self, rank: int = 0) -> wire.Sender:
        self.seq += 1
        return wire.Sender(wire.Node("worker", rank, 1), self.seq, self.seq)


def per_member(members: int, action: Callable[[Crowd], Any], **how: Any) -> float:
    crowd = Crowd(members, **how)
    return steps(lambda: action(crowd)) / members


def all_come_to_a_barrier(crowd: Crowd) -> None:
    for rank in range(crowd.workers):
        outbox = crowd.say(wire.Barrier(crowd.me(rank), store=0, number=1))
    assert len(outbox) == crowd.workers


def half_wait_at_a_barrier_for_one_that_leaves(crowd: Crowd) -> None:
    for rank in range(crowd.workers // 2):
        crowd.say(wire.Barrier(crowd.me(rank), store=0, number=1))
    crowd.say(wire.Leave(crowd.me(crowd.workers - 1), error=None))
    crowd.now += 2.0
    assert len(crowd.scheduler.tick(crowd.now)) == crowd.workers // 2 + crowd.servers


def all_join(crowd: Crowd) -> None:
    for rank in range(crowd.workers):
        crowd.say(wire.Pause(crowd.me(rank), 0, 1, 0, [], []))


def all_make_and_close_a_store(crowd: Crowd) -> None:
    for make in (lambda me: wire.OpenStore(me, ordinal=1), lambda me: wire.CloseStore(me, store=0)):
        for rank in range(crowd.workers):
            crowd.say(make(crowd.me(rank)))


def declare(crowd: Crowd, rank: int) -> wire.Declare:
    keys = [f"key {number}" for number in range(20)]
    kinds = [0] * len(keys)
    return wire.Declare(crowd.me(rank), 0, keys, kinds, shapes=[[3, 4]], dtypes=["float32"], bound=1000, longest=2**40)


def all_declare_keys_before_and_after_they_are_there(crowd: Crowd) -> None:
    early, late = range(1, crowd.workers // 2), range(crowd.workers // 2, crowd.workers)
    for rank in early:
        assert crowd.say(declare(crowd, rank)) == []
    first = declare(crowd, 0)
    crowd.say(first)
    for key in first.keys:
        outbox = crowd.say(wire.Ready(crowd.me(0), store=0, keys=[key]))
    assert len(outbox) == 1 + len(early)
    for rank in late:
        assert len(crowd.say(declare(crowd, rank))) == 1


def half_leave_one_by_one(crowd: Crowd) -> None:
    for rank in range(1, crowd.workers, 2):
        crowd.now += 0.001
        crowd.say(wire.Leave(crowd.me(rank), error=None))
    crowd.now += 2.0
    assert len(crowd.scheduler.tick(crowd.now)) == crowd.servers
    crowd.second()


def half_come_to_a_barrier_while_half_are_leaving(crowd: Crowd) -> None:
    for rank in range(crowd.workers):
        leaves = rank < crowd.workers // 2
        crowd.say(wire.Leave(crowd.me(rank), error=None) if leaves else wire.Barrier(crowd.me(rank), store=0, number=1))


def one_is_lost_and_all_are_told_at_each_beat(crowd: Crowd) -> None:
    crowd.say(wire.Lost("worker", 1, "was killed"))
    crowd.second()
    for rank in range(2, crowd.workers):
        crowd.say(wire.Leave(crowd.me(rank), error="NodeLost"))


@pytest.mark.parametrize("hints", [True, False])
def test_a_second_of_beats_and_ticks_costs_each_member_the_same(hints: bool):
    few, many = (per_member(members, Crowd.second, hints=hints) for members in (FEW, MAX_NODES))
    assert same(few, many), (few, many)


@pytest.mark.parametrize("hints", [True, False])
def test_joining_costs_each_member_the_same(hints: bool):
    def join(crowd: Crowd) -> None:
        for message in crowd.joins(hints=hints):
            outbox = crowd.say(message)
        assert len(outbox) == crowd.workers + crowd.servers

    few, many = (per_member(members, join, start=False) for members in (FEW, MAX_NODES))
    assert same(few, many), (few, many)


def test_saying_who_is_absent_to_all_who_wait_costs_each_the_same():
    def ask(crowd: Crowd) -> None:
        for join in list(crowd.joins(hints=True))[:-1]:
            crowd.say(join)
            asked = wire.Explain(wire.Sender(join.node, 2, 0), about=1)
        for _ in range(crowd.workers + crowd.servers):
            crowd.say(asked)

    few, many = (per_member(members, ask, start=False) for members in (FEW, MAX_NODES))
    assert same(few, many), (few, many)


@pytest.mark.parametrize(
    "action",
    [
        all_come_to_a_barrier,
        half_wait_at_a_barrier_for_one_that_leaves,
        all_join,
        all_make_and_close_a_store,
        all_declare_keys_before_and_after_they_are_there,
        half_leave_one_by_one,
        half_come_to_a_barrier_while_half_are_leaving,
        one_is_lost_and_all_are_told_at_each_beat,
    ],
    ids=lambda action: action.__name__,
)
def test_what_all_members_do_costs_each_the_same(action: Callable[[Crowd], Any]):
    few, many = (per_member(members, action) for members in (FEW, MAX_NODES // 4))
    assert same(few, many), (few, many)
