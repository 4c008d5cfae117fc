"""Whatever is thrown at a shard or a scheduler: no exception gets out, and good requests go on working."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from asking import Desk, floats, sent, values_in
from asking_rows import init_tables
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from malformed import anything, flood
from rendezvous import Job

from kvstore import wire
from kvstore.errors import WireError
from kvstore.spec import Spec
from kvstore.table import Table

SPARE = 9  # a store that the good worker alone uses
EXAMPLES = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


def messages_in(thrown: list[Any]) -> Iterator[wire.Message]:
    """Those that decode, but for what the good worker could have said itself."""
    for frames in thrown:
        with contextlib.suppress(WireError):
            message = wire.decode(frames)
            mine = isinstance(message, wire.Request) and message.node[:2] == ("worker", 2)
            if not mine and getattr(message, "store", 0) != SPARE:
                yield message


@EXAMPLES
@given(st.lists(anything, min_size=12, max_size=40))
def test_a_shard_survives_anything(thrown: list[Any]):
    desk = Desk(3, values={1: floats(0, 0), 2: floats(0)}, aggregated=[[0, 1]])
    a, _, good = desk.workers
    a.seq = good.seq = 1000
    for worker, message in (
        (a, a.open("async", store=SPARE)),
        (a, a.init({1: floats(0)}, store=SPARE)),
        (a, a.set_optimizer("sgd", 1.0, store=SPARE)),
        (a, init_tables(a, {4: Table(shape=(3, 2))})),
        (a, a.open("async", store=1)),
        (a, a.init({1: floats(0, 0)}, store=1)),
        (a, a.set_optimizer("sgd", 1.0, store=1, momentum=0.5)),
        (good, good.open("async", store=SPARE)),
    ):
        assert desk.reply(worker, message) == wire.Ack(message.seq)
    for message in messages_in(thrown):
        for _, reply in desk.shard.handle(b"stranger", message):
            assert sent(reply) is not None
    push = good.push({1: floats(1)}, want=True, store=SPARE)
    assert values_in(desk.reply(good, push), [Spec((1,), "float32")])[0].tolist() == [-1]
    desk.shard.depart([0, 1])


@EXAMPLES
@given(st.lists(anything, min_size=12, max_size=40), st.booleans())
def test_a_scheduler_survives_anything(thrown: list[Any], started: bool):
    job = Job(3, 2, start=started)
    w0, _, good = job.workers
    scheduler = job.scheduler
    if started:
        job.say(w0, w0.declare("k", store=SPARE))
        job.say(w0, wire.Ready(w0.me(), store=SPARE, keys=["k"]))
    for message in messages_in(thrown):
        obeyed = isinstance(message, wire.Lost) or (isinstance(message, wire.Leave) and message.node.incarnation == 1)
        if not obeyed:
            for _, reply in scheduler.handle(b"stranger", message, job.now):
                assert sent(reply) is not None
            scheduler.tick(job.now)
    assert scheduler.failure is None
    if started:
        declare = good.declare("k", store=SPARE)
        assert job.reply(good, declare) == wire.Placed(declare.seq, [1], [0], [0], [0], [1])
        census = wire.Census(good.me())
        assert job.reply(good, census) == wire.Counted(census.seq, 0)


def test_nothing_of_the_flood_is_a_message():
    for frames in flood(3000):
        with contextlib.suppress(WireError):
            raise AssertionError(f"{wire.decode(frames)} is one")


def test_good_messages_decode_so_that_mutations_are_near_misses():
    from asking import Worker
    from malformed import good

    assert [wire.decode(wire.encode(message)) for message in good(Worker(0))]
