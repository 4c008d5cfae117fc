"""Measurements inside one process: what a core spends on messages, in jobs of thousands of workers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from benchmarks.cores import Core
from benchmarks.crowd import Crowd, SimulatedJob
from benchmarks.networks import Shape, elements, shapes_of
from kvstore import wire
from kvstore.job.config import bound_of
from kvstore.placement import place
from kvstore.spec import Spec

# ---- what a core spends on messages


def test_a_core_is_measured_message_by_message() -> None:
    heard = []

    def handle(peer: bytes, message: object) -> list[tuple[bytes, wire.Alive]]:
        heard.append((peer, message))
        return [(peer, wire.Alive())] * 2

    core = Core("scheduler", handle)
    beat = wire.Beat(wire.Node("worker", 3, 1))
    step = core.take("beats", [(b"one", beat), (b"two", beat)])
    assert heard == [(b"one", beat), (b"two", beat)], "as they arrive at the other end"
    assert (step.role, step.name, len(step.each), step.sent) == ("scheduler", "beats", 2, 4)
    assert min(step.each) > 0
    assert core.last == [(b"two", wire.Alive())] * 2
    assert (step.received_bytes > 2, step.sent_bytes > 4) == (True, True)


# ---- jobs of thousands of workers through the cores: what a message costs does not grow with their number


SHAPES: list[Shape] = [(1_200_000,), (700_000,), (1000,)]  # cut over all servers, and whole
SERVERS = 2


def calls(action: Callable[[], Any]) -> int:
    """How many functions of Python ``action`` calls."""
    count = 0

    def profile(_frame: FrameType, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        action()
    finally:
        sys.setprofile(before)
    return count


def job(hosts: int, *, aggregated: bool = True, piece: int = 1 << 20) -> SimulatedJob:
    return SimulatedJob(Crowd(hosts, 8, SERVERS, SHAPES, aggregated, piece))


@pytest.mark.parametrize("aggregated", [True, False])
def test_servers_get_every_message_and_answer_it(aggregated: bool) -> None:
    small = job(4, aggregated=aggregated)
    steps, placed = small.schedule()
    assert {step.role for step in steps} == {"scheduler"}
    members = 4 * 8 + SERVERS + 4 * aggregated
    assert (len(steps[0].each), steps[0].sent) == (members, members)
    for number, parcels in enumerate(small.parcels(placed)):
        assert parcels
        counted = small.serve(number, parcels)[2]
        pushes = len(parcels) * (4 if aggregated else 4 * 8)
        assert (counted.name, len(counted.each), counted.sent) == ("a round", pushes, pushes)


def test_an_aggregator_sends_one_of_eight_on() -> None:
    small = job(4)
    _, placed = small.schedule()
    parcels = sum(map(len, small.parcels(placed)))
    _, _, pushed, answered = small.aggregate(placed)
    assert (len(pushed.each), len(answered.each), answered.sent) == (8 * parcels, parcels, 8 * parcels)


@pytest.mark.parametrize("aggregated", [True, False])
def test_a_message_costs_the_same_among_few_and_many_workers(aggregated: bool) -> None:
    def scheduler(hosts: int) -> int:
        return calls(job(hosts, aggregated=aggregated).schedule)

    def server(hosts: int) -> int:
        crowd = job(hosts, aggregated=aggregated, piece=1 << 30)
        parcels = crowd.parcels(crowd.schedule()[1])[0]
        return calls(lambda: crowd.serve(0, parcels))

    assert scheduler(32) <= 4.1 * scheduler(8)
    assert server(32) <= 4.1 * server(8)


@pytest.mark.parametrize("servers", [16, 64, 256])
def test_servers_have_the_same_to_carry(servers: int) -> None:
    shapes = shapes_of("resnet50")
    loads = [0] * servers
    place({str(key): Spec(shape, "float32") for key, shape in enumerate(shapes)}, loads, bound_of(servers))
    assert max(loads) <= 1.1 * 4 * elements(shapes) / servers
