"""What a message costs a server does not depend on how many workers there are.

The last message of a round does work for each worker, so what all of them do is counted as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from asking import Worker, floats, sent
from costs import peak, same, steps

from kvstore import wire
from servers.shard import Shard

FEW, MANY = 16, 256
SEGMENTS = {1: floats(1, 2), 2: floats(3)}


class Rush:
    def __init__(self, workers: int, mode: str = "sync", **rule: Any) -> None:
        self.shard = Shard(0, workers)
        self.workers = [Worker(rank) for rank in range(workers)]
        for worker in self.workers:
            self.say(worker, worker.open(mode, **rule))
        self.say(self.workers[0], self.workers[0].init(SEGMENTS))
        if mode == "async":
            for worker in self.workers:
                self.say(worker, worker.set_optimizer())

    def say(self, worker: Worker, message: wire.Message) -> int:
        return len(self.shard.handle(worker.peer, message))

    def push(self, worker: Worker, clock: int) -> int:
        worker.done = worker.seq + 1
        return self.say(worker, worker.push(SEGMENTS, clock, want=True))

    def pause(self, worker: Worker, clock: int) -> int:
        return self.say(worker, worker.pause(dict.fromkeys(SEGMENTS, clock)))

    def close(self, worker: Worker) -> int:
        return self.say(worker, wire.Close(worker.me(), store=0))


def open_push_and_close(rush: Rush) -> None:
    for clock in (1, 2):
        answers = [rush.push(worker, clock) for worker in rush.workers]
        assert answers == [0] * (len(answers) - 1) + [len(answers)]
    for worker in rush.workers:
        assert rush.close(worker) == 1


def push_where_nobody_waits(rush: Rush) -> None:
    for clock in (1, 2):
        for worker in rush.workers:
            assert rush.push(worker, clock) == 1


def push_when_half_have_left(rush: Rush) -> None:
    half = len(rush.workers) // 2
    rush.shard.depart(range(half))
    for clock in (1, 2, 3):
        assert sum(rush.push(worker, clock) for worker in rush.workers[half:]) == half


def join_while_others_push(rush: Rush) -> None:
    """The second half pushes twice; the first half pauses after one push each while the second half waits."""
    half = len(rush.workers) // 2
    for worker in rush.workers:
        rush.push(worker, 1)
    for worker in rush.workers[half:]:
        assert rush.push(worker, 2) == 0
    answers = [rush.pause(worker, 1) for worker in rush.workers[:half]]
    assert answers == [0] * (half - 1) + [half]
    answers = [rush.pause(worker, 2) for worker in rush.workers[half:]]
    assert answers == [0] * (half - 1) + [2 * half]


CASES: dict[str, tuple[Callable[[Rush], None], dict[str, Any]]] = {
    "sync": (open_push_and_close, {}),
    "async": (push_where_nobody_waits, {"mode": "async"}),
    "ssp": (push_where_nobody_waits, {"mode": "async", "staleness": 1}),
    "quorum": (push_when_half_have_left, {"quorum": FEW // 2}),
    "join": (join_while_others_push, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_what_all_workers_do_costs_each_the_same(name: str) -> None:
    action, rule = CASES[name]

    def each(workers: int) -> float:
        chosen = rule | ({"quorum": workers // 2} if "quorum" in rule else {})
        rush = Rush(workers, **chosen)
        return steps(lambda: action(rush)) / workers

    few, many = each(FEW), each(MANY)
    assert same(few, many), (few, many)


def pushes(rush: Rush) -> Callable[[Worker], Any]:
    return lambda worker: rush.push(worker, 1)


def pushes_while_one_pauses(rush: Rush) -> Callable[[Worker], Any]:
    rush.pause(rush.workers[0], 0)
    return lambda worker: rush.push(worker, 1)


def pauses(rush: Rush) -> Callable[[Worker], Any]:
    return lambda worker: rush.pause(worker, 0)


def opens_again(rush: Rush) -> Callable[[Worker], Any]:
    return lambda worker: rush.say(worker, worker.open(rush.shard.stores[0].rule.mode))


def closes(rush: Rush) -> Callable[[Worker], Any]:
    return rush.close


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("kind", [pushes, pushes_while_one_pauses, pauses, opens_again, closes])
def test_no_message_makes_a_set_of_all_workers(kind: Callable[[Rush], Callable[[Worker], Any]], mode: str) -> None:
    workers = 8 * MANY
    rush = Rush(workers, mode)
    say = kind(rush)
    least = min(peak(lambda worker=worker: say(worker)) for worker in rush.workers[1:9])  # a dict may have to grow
    assert least < 8 * workers, "a set of them takes 32 bytes for each worker, and a list 8"


def test_a_contribution_like_the_first_costs_a_third_less() -> None:
    rush = Rush(MANY)
    first, second, third, last = rush.workers[:4]
    pushes = [(worker, sent(worker.push(SEGMENTS, 1, want=True))) for worker in (first, second, third)]
    _, known, again = (steps(lambda worker=worker, push=push: rush.say(worker, push)) for worker, push in pushes)
    plain = last.push(SEGMENTS, 1, want=True)  # it has not come over the wire: nothing is known of it
    usual = steps(lambda: rush.say(last, plain))
    assert known == again <= 2 / 3 * usual, (known, usual)


def test_the_end_of_a_round_costs_the_same_for_each_contribution_of_few_workers_or_many() -> None:
    def each(contributors: int, host: int) -> float:
        ranks = [list(range(first, first + host)) for first in range(0, contributors * host, host)]
        shard = Shard(0, contributors * host, aggregated=ranks)
        for worker in map(Worker, range(contributors * host)):
            shard.handle(worker.peer, worker.open())
        starter = Worker(0)
        starter.seq = 10
        shard.handle(starter.peer, starter.init(SEGMENTS))
        members = [Worker(number, role="aggregator") for number in range(contributors)]
        pushes = [sent(m.push(SEGMENTS, 1, want=True, ranks=of)) for m, of in zip(members, ranks, strict=True)]
        for member, push in zip(members[:-1], pushes, strict=False):
            assert not shard.handle(member.peer, push)
        return steps(lambda: shard.handle(members[-1].peer, pushes[-1])) / contributors

    assert same(each(32, 1), each(32, 8))
