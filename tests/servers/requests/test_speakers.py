"""Who may ask a server, and for whom."""

from __future__ import annotations

from dataclasses import replace

import pytest
from asking import Worker, floats

from kvstore import wire
from kvstore.errors import UsageError
from servers.shard import Speakers

HOSTS = [[0, 1], [2, 4]]


@pytest.fixture
def speakers() -> Speakers:
    return Speakers(5, ["w0", "w1"], HOSTS, ["a0"])


def test_members_are_known_by_their_keys_and_nobody_else_is(speakers: Speakers):
    known = {wire.Node("worker", 0, 1): "w0", wire.Node("worker", 1, 1): "w1", wire.Node("aggregator", 0, 1): "a0"}
    known |= {wire.Node("worker", 4, 1): "", wire.Node("aggregator", 1, 1): ""}
    assert {node: speakers.key(node) for node in known} == known
    for stranger in (("worker", 5, 1), ("worker", 0, 2), ("aggregator", 2, 1), ("aggregator", -1, 1), ("server", 0, 1)):
        assert speakers.key(wire.Node(*stranger)) is None


def test_each_may_say_what_is_its_own_to_say(speakers: Speakers):
    worker, aggregator = Worker(4), Worker(1, role="aggregator")
    for message in (
        worker.push({1: floats(1)}),
        worker.pull([1]),
        worker.init({1: floats(1)}),
        aggregator.push({1: floats(1)}, ranks=[2, 4]),
        aggregator.push({1: floats(1)}, ranks=[4], rank_clocks=[1]),
        aggregator.pull([1], ranks=[2]),
    ):
        speakers.require(message)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (Worker(3).push({1: floats(1)}, ranks=[3]), "worker 3 sent a Push for worker 3; a worker sends without ranks"),
        (Worker(3).pull([1], ranks=[0, 1]), "worker 3 sent a Pull for workers 0, 1; a worker sends without ranks"),
        (replace(Worker(0).push({1: floats(1)}), encode=["fp16", []]), "worker 0 sent a Push with encode"),
        (
            replace(Worker(0, role="aggregator").push({1: floats(1)}, ranks=[0]), encode=["fp16", []]),
            "aggregator 0 sent a Push with encode, which asks an aggregator to compress",
        ),
        (Worker(0, role="aggregator").push({1: floats(1)}), "aggregator 0 sent a Push without ranks"),
        (Worker(0, role="aggregator").pull([1]), "aggregator 0 sent a Pull without ranks"),
        (
            Worker(0, role="aggregator").push({1: floats(1)}, ranks=[0, 1, 2]),
            "aggregator 0 sent a Push for workers 0 to 2; it speaks for workers 0, 1 only",
        ),
        (Worker(1, role="aggregator").pull([1], ranks=[3]), "a Pull for worker 3; it speaks for workers 2, 4 only"),
        (Worker(1, role="aggregator").open(), "aggregator 1 sent a Open; servers take Push, Pull and Explain from"),
        (Worker(1, role="aggregator").pause({}), "aggregator 1 sent a Pause; servers take Push, Pull and Explain from"),
    ],
)
def test_nobody_speaks_for_others_than_it_may(speakers: Speakers, message: wire.Request, words: str):
    with pytest.raises(UsageError, match=words):
        speakers.require(message)
