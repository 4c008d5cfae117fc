"""Whole jobs in virtual time whose servers have standbys: what becomes of a process that dies, or is taken for dead."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from inproc import InprocNetwork
from simulation.job import Outcome, Program, SimulatedJob
from simulation.network import Weather

from kvstore import wire
from kvstore.client import DistStore
from kvstore.errors import REPLACED_EXIT, WireError
from servers.replication.pair_process import StandbyLink, stored
from servers.shard import Shard

KEYS = ["a", "b", "c"]
SIZES = (5, 2000, 40)  # the second is cut over both servers


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def train(store: DistStore, rest: Callable[[], None] = lambda: None) -> list[list[float]]:
    outs = [torch.zeros(size) for size in SIZES]
    store.set_optimizer("sgd", learning_rate=0.5, momentum=0.5)
    store.init(KEYS, outs)
    for step in range(20):
        store.pushpull(KEYS, [torch.full((size,), float(step + store.rank)) for size in SIZES], outs)
        rest()
    return [out.tolist() for out in outs]


def job(**options: Any) -> SimulatedJob:
    return SimulatedJob(1, options.pop("weather", Weather()), replicas=1, restarts=4, bigarray_bound=1000, **options)


def run(
    made: SimulatedJob, at: int = 0, action: Callable[[], None] = lambda: None, program: Program = train
) -> Outcome:
    """Run it; call ``action`` after so many messages."""

    def look() -> None:
        if made.network.deliveries == at:
            made.world.after(0.0, action)

    made.network.on_delivery = look
    return made.run(program)


@pytest.fixture(scope="module")
def undisturbed() -> Outcome:
    outcome = SimulatedJob(1, bigarray_bound=1000).run(train)
    assert not outcome.errors
    return outcome


def require_exact(outcome: Outcome, undisturbed: Outcome) -> None:
    assert (outcome.errors, outcome.hanging) == ({}, []), outcome.trace()
    assert outcome.results == undisturbed.results
    assert set(outcome.exit_codes.values()) == {0}


def test_with_standbys_the_values_are_the_same(undisturbed: Outcome) -> None:
    outcome = run(job())
    require_exact(outcome, undisturbed)
    assert set(outcome.exit_codes) == {"scheduler", "server 0", "server 1", "standby 0", "standby 1"}


@pytest.mark.parametrize("who", ["server 0", "standby 1"])
@pytest.mark.parametrize("at", [60, 250])
def test_one_that_dies_is_replaced_and_changes_no_bit(who: str, at: int, undisturbed: Outcome) -> None:
    made = job()
    outcome = run(made, at, lambda: made.kill(who))
    require_exact(outcome, undisturbed)
    assert outcome.starts[who] == 2


def test_links_that_break_lose_nothing(undisturbed: Outcome) -> None:
    require_exact(run(job(weather=Weather(cut=0.05, repeat=0.1))), undisturbed)


def test_one_that_was_given_up_and_wakes_up_ends_and_says_that_it_was_replaced(undisturbed: Outcome) -> None:
    made = job()
    server = None

    def pause() -> None:
        nonlocal server
        server = made.processes["server 1"]
        server.stop()
        made.world.after(8.0, server.resume)

    def rest() -> None:
        task = made.world.current
        assert task is not None
        task.wait(0.5)

    outcome = run(made, 100, pause, lambda store: train(store, rest))
    require_exact(outcome, undisturbed)
    assert server is not None
    assert server.tasks[0].result == REPLACED_EXIT


def test_a_standby_that_cannot_apply_a_change_ends_and_is_replaced(
    undisturbed: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    really, left = Shard.apply, [20]

    def apply(shard: Shard, message: Any) -> None:
        left[0] -= 1
        if not left[0]:
            raise ZeroDivisionError("cannot")
        really(shard, message)

    monkeypatch.setattr(Shard, "apply", apply)
    outcome = run(job())
    require_exact(outcome, undisturbed)
    assert outcome.starts["standby 0"] + outcome.starts["standby 1"] == 3


SERVER = wire.Node("server", 1, 1)


def test_it_says_first_whose_it_is() -> None:
    network = InprocNetwork()
    mine, theirs = network.transport(), network.transport()
    theirs.bind("inproc://standby")
    link = StandbyLink(mine, "inproc://standby", SERVER)
    link.send(wire.Record(1, 1, wire.encode(wire.Ack(3))))
    received = [theirs.recv(5.0), theirs.recv(5.0)]
    assert [wire.decode(each[1]) for each in received if each is not None] == [
        wire.Here(SERVER),
        wire.Record(1, 1, wire.encode(wire.Ack(3))),
    ]
    peer = received[0][0] if received[0] is not None else b""
    theirs.send(peer, wire.encode(wire.Stored(1, 1)))
    answer = mine.recv(5.0)
    assert answer is not None
    assert answer[0] == link.peer
    assert stored(answer[1]) == wire.Stored(1, 1)
    for end in (mine, theirs):
        end.close()


def test_made_anew_it_says_again_whose_it_is() -> None:
    network = InprocNetwork()
    mine, theirs = network.transport(), network.transport()
    theirs.bind("inproc://standby")
    link = StandbyLink(mine, "inproc://standby", SERVER)
    before = link.peer
    link.renew()
    received = [theirs.recv(5.0), theirs.recv(5.0)]
    assert [wire.decode(each[1]) for each in received if each is not None] == [wire.Here(SERVER), wire.Here(SERVER)]
    assert len({each[0] for each in received if each is not None}) == 2
    assert link.peer != before
    for end in (mine, theirs):
        end.close()


def test_a_standby_says_nothing_else() -> None:
    with pytest.raises(WireError, match="expected Stored of a standby, got Ack"):
        stored(wire.encode(wire.Ack(1)))
