"""Jobs of thousands of workers through the cores: what a message costs does not grow with their number."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from benchmarks import strangers
from benchmarks.crowd import Crowd, SimulatedJob
from benchmarks.networks import Shape, elements, shapes_of
from benchmarks.programs.stranger import KINDS
from kvstore.job.config import bound_of
from kvstore.placement import place
from kvstore.spec import Spec

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


def test_what_objects_take_is_said_for_each_role() -> None:
    held = job(2).held_mb()
    assert held.keys() == {"scheduler", "server"}
    assert all(megabytes > 0 for megabytes in held.values())


@pytest.mark.parametrize("servers", [16, 64, 256])
def test_servers_have_the_same_to_carry(servers: int) -> None:
    shapes = shapes_of("resnet50")
    loads = [0] * servers
    place({str(key): Spec(shape, "float32") for key, shape in enumerate(shapes)}, loads, bound_of(servers))
    assert max(loads) <= 1.1 * 4 * elements(shapes) / servers


def test_each_kind_is_compared_with_nobody(monkeypatch, capsys):
    def pretend(kind, net, rounds):
        assert (net, rounds) == ("1MB", 5)
        return (200.0, {}) if kind == strangers.NOBODY else (50.0, {"cpu": 0.9})

    monkeypatch.setattr(strangers, "rounds_a_second", pretend)
    monkeypatch.setattr(sys, "argv", ["strangers", "--net", "1MB", "--rounds", "5", "--repeats", "1"])
    strangers.main()
    first, *others = capsys.readouterr().out.splitlines()
    assert first.split() == ["nobody", "200.0", "rounds/s,", "100%"]
    assert [line.split()[0] for line in others] == list(KINDS)
    assert all(line.endswith("25%, cpu 0.9") for line in others)
